"""What every rollout engine must do. A test module derives a `Test...` class and provides the fixture `harness`.

    class TestMyEngine(EngineContract):
        @pytest.fixture
        def harness(self): ...

The engine may be shared between tests (a server is slow to start): each test begins with `base` weights, awake.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from miles_dmd2.algo import normal, sigma_grid
from miles_dmd2.engines.base import EngineError, RolloutEngine
from miles_dmd2.models.base import ModelAdapter
from miles_dmd2.models.weights import checksum
from miles_dmd2.types import Probe, RolloutRequest, RolloutSample, WeightUpdate, WeightVersion

Weights = tuple[WeightUpdate, dict[str, Tensor]]
GRID = tuple(sigma_grid(4, 3.0).tolist())


@dataclass
class Harness:
    """An engine, what it should compute, and how near it must come.

    reference: the checkpoint's transformer in fp32, in this process. prompts: of different token lengths.
    same: tolerance between two ways of batching or two implementations; 0 where `exact` says bitwise.
    """

    engine: RolloutEngine
    adapter: ModelAdapter
    reference: nn.Module
    prompts: Sequence[str]
    same: float = 1e-5
    exact: bool = True
    decodes: Callable[[], int] = lambda: 0
    further: str = ""  # a prompt whose conditioning is asked for; another where the family is never asked for ""

    def weights(self, step: int, kind: str = "raw") -> Weights:
        """Weights of a student after `step` updates: the checkpoint's at 0, moved by fixed noise after."""
        module = self.student(step)
        tensors = {name: value.detach().clone() for name, value in module.state_dict().items()}
        x, sigma, cond = (
            normal(5, (1, *self.adapter.latent_shape)),
            torch.tensor([0.7]),
            self.adapter.probe_conditioning(),
        )
        with torch.no_grad():
            velocity = self.adapter.velocity(module, x, sigma, self.adapter.collate([cond]))
        probe = Probe(x, sigma, cond, velocity)
        return WeightUpdate(WeightVersion(step, kind), checksum(tensors), probe, None), tensors

    def student(self, step: int) -> nn.Module:
        module = copy.deepcopy(self.reference)
        with torch.no_grad():
            for i, parameter in enumerate(module.parameters()):
                parameter.add_(0.05 * step * normal(1000 + i, parameter.shape))
        return module

    def unseen(self) -> str:
        """A parameter that no velocity depends on, if there is one: a fault in it escapes every probe."""
        idle = self.adapter.idle_parameters(self.reference)
        return min(idle) if idle else max(self.reference.state_dict())

    def load(self, step: int, kind: str = "raw") -> None:
        update, tensors = self.weights(step, kind)
        self.engine.load_weights(update, tensors)

    def requests(self, *stop_steps: int, start: int = 10, decode: bool = False) -> list[RolloutRequest]:
        """One per stop step; ids, seeds and prompts go round."""
        return [
            RolloutRequest(start + i, self.prompts[i % len(self.prompts)], 500 + start + i, GRID, stop, decode)
            for i, stop in enumerate(stop_steps)
        ]

    def velocity(self, step: int, samples: Sequence[RolloutSample], x: Tensor, sigma: float) -> Tensor:
        """The reference's, for these samples' conditioning as one batch."""
        cond = self.adapter.collate([sample.cond for sample in samples])
        with torch.no_grad():
            return self.adapter.velocity(self.student(step), x, torch.full((len(samples),), sigma), cond)

    def level(self, sigma: float) -> Tensor:
        """The noise level of each value of a latent: of several parts the picture's is sigma."""
        return self.adapter.spread(self.adapter.part_sigmas(torch.tensor([sigma])))[0]

    def close_to(self, a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(a, b, rtol=0, atol=0 if self.exact else self.same)


def real_latents(adapter: ModelAdapter) -> Tensor:
    """What the engine under test has to be made with."""
    return torch.stack([normal(700 + row, adapter.latent_shape) for row in range(3)])


def by_hand(harness: Harness, request: RolloutRequest, cond: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """x_k and x0 of one SDE sample: x' = (1 - s') x0 + s' noise, the noise from the draws after the first one."""
    shape = harness.adapter.latent_shape
    generator = torch.Generator().manual_seed(request.seed)
    torch.randn(shape, generator=generator)
    x, on = harness.adapter.initial_noise(request.seed)[None], harness.adapter.collate([cond])
    for sigma, after in zip(request.sigmas[: request.stop_step], request.sigmas[1:], strict=False):
        with torch.no_grad():
            x0 = x - sigma * harness.adapter.velocity(harness.reference, x, torch.tensor([sigma]), on)
        x = (1 - after) * x0 + after * torch.randn(shape, generator=generator)
    sigma = request.sigmas[request.stop_step]
    with torch.no_grad():
        return x[0], (x - sigma * harness.adapter.velocity(harness.reference, x, torch.tensor([sigma]), on))[0]


def equal(a: RolloutSample, b: RolloutSample) -> bool:
    media = (a.media is None) == (b.media is None) and (a.media is None or torch.equal(a.media, b.media))
    cond = a.cond.keys() == b.cond.keys() and all(torch.equal(a.cond[key], b.cond[key]) for key in a.cond)
    same = (a.sample_id, a.prompt, a.seed, a.stop_step, a.weight_version) == (
        (b.sample_id, b.prompt, b.seed, b.stop_step, b.weight_version)
    )
    tensors = torch.equal(a.x_k, b.x_k) and torch.equal(a.x0, b.x0) and torch.equal(a.sigmas, b.sigmas)
    return same and tensors and media and cond


def all_equal(a: Sequence[RolloutSample], b: Sequence[RolloutSample]) -> bool:
    return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))


def stacked(samples: Sequence[RolloutSample], name: str) -> Tensor:
    return torch.stack([getattr(sample, name) for sample in samples])


def spoil(weights: Weights, how: str, last: str) -> Weights:
    """The same update with one fault, in the tensor `last` if it is in one."""
    update, tensors = weights
    if how == "missing name":
        del tensors[last]
    elif how == "unexpected name":
        tensors["stop_step_embedding"] = torch.zeros(4)
    elif how == "renamed":
        tensors["module." + last] = tensors.pop(last)
    elif how == "wrong shape":
        tensors[last] = tensors[last].unsqueeze(0)
    elif how == "NaN":
        tensors[last].view(-1)[0] = float("nan")
    elif how == "infinite":
        tensors[last].view(-1)[0] = float("inf")
    elif how == "integers":
        tensors[last] = tensors[last].to(torch.int64)
    if how == "wrong checksum":
        tensors[last].view(-1)[0] += 1e-3
    else:
        update = dataclasses.replace(update, checksum=checksum(tensors))
    probe, velocity = update.probe, update.probe.velocity
    if how == "wrong probe":
        probe = dataclasses.replace(probe, velocity=-velocity)
    elif how == "probe a little off":
        probe = dataclasses.replace(probe, velocity=velocity * (1 + 1e-3))
    elif how == "probe NaN":
        probe = dataclasses.replace(probe, velocity=velocity * float("nan"))
    elif how == "probe of another shape":
        probe = dataclasses.replace(probe, velocity=velocity[:, :1])
    elif how == "probe of another canvas":
        probe = dataclasses.replace(probe, x=probe.x[:, :1], velocity=velocity[:, :1])
    elif how == "probe of another family":
        probe = dataclasses.replace(probe, cond={"pooled": torch.zeros(3)})
    return dataclasses.replace(update, probe=probe), tensors


FAULTS = (
    *("missing name", "unexpected name", "renamed", "wrong shape", "NaN", "infinite", "integers", "wrong checksum"),
    *("wrong probe", "probe a little off", "probe NaN", "probe of another shape"),
    *("probe of another canvas", "probe of another family"),
)


class SamplingContract:
    """Rollouts alone: what takes a real server of each family seconds."""

    @pytest.fixture(autouse=True)
    def _base_weights(self, harness: Harness) -> None:
        harness.engine.wake()
        harness.load(0)

    # -- generate --------------------------------------------------------------------------------------------

    def test_answers_in_request_order(self, harness: Harness) -> None:
        requests = harness.requests(3, 0, 2, 0, 1, 3, 0)[::-1]
        samples = harness.engine.generate(requests)
        assert [s.sample_id for s in samples] == [r.sample_id for r in requests]
        for request, sample in zip(requests, samples, strict=True):
            assert (sample.prompt, sample.seed, sample.stop_step) == (request.prompt, request.seed, request.stop_step)
            assert tuple(sample.sigmas.tolist()) == request.sigmas
            assert sample.weight_version == WeightVersion(0)
            assert sample.x_k.shape == sample.x0.shape == harness.adapter.latent_shape
            assert {sample.x_k.dtype, sample.x0.dtype, sample.sigmas.dtype} == {torch.float32}
            assert {sample.x_k.device.type, sample.x0.device.type} == {"cpu"}

    def test_no_requests_no_samples(self, harness: Harness) -> None:
        assert harness.engine.generate([]) == []

    def test_the_same_requests_twice_are_bitwise_equal(self, harness: Harness) -> None:
        requests = harness.requests(3, 1, 0, 3)
        assert all_equal(harness.engine.generate(requests), harness.engine.generate(requests))

    def test_starts_at_the_first_sigma_times_the_seeds_noise(self, harness: Harness) -> None:
        requests = harness.requests(0, 0, 0)
        for request, sample in zip(requests, harness.engine.generate(requests), strict=True):
            assert torch.equal(sample.x_k, harness.adapter.initial_noise(request.seed))

    def test_one_step_from_below_one_starts_there(self, harness: Harness) -> None:
        grid = tuple(torch.tensor([0.999, 0.0]).tolist())
        (request,) = harness.requests(0)
        (sample,) = harness.engine.generate([dataclasses.replace(request, sigmas=grid)])
        assert torch.equal(sample.x_k, harness.level(0.999) * harness.adapter.initial_noise(request.seed))
        velocity = harness.velocity(0, [sample], sample.x_k.unsqueeze(0), grid[0])
        harness.close_to(sample.x0, sample.x_k - harness.level(0.999) * velocity[0])

    def test_seed_decides_the_noise_and_the_prompt_the_rest(self, harness: Harness) -> None:
        (request,) = harness.requests(0)
        variants = [
            request,
            dataclasses.replace(request, sample_id=1, seed=request.seed + 1),
            dataclasses.replace(request, sample_id=2, prompt=harness.prompts[1]),
        ]
        base, reseeded, reworded = harness.engine.generate(variants)
        assert not torch.equal(base.x_k, reseeded.x_k)
        assert torch.equal(base.x_k, reworded.x_k)
        assert (base.x0 - reworded.x0).abs().max() > 1e-4

    def test_every_stop_step_is_a_prefix_of_the_whole(self, harness: Harness) -> None:
        """By hand, with the reference: x_k and x0 of stop step k for the same batch."""
        rows = [harness.engine.generate(harness.requests(stop, stop, stop)) for stop in range(4)]
        x = stacked(rows[0], "x_k")
        for k, samples in enumerate(rows):
            harness.close_to(stacked(samples, "x_k"), x)
            velocity = harness.velocity(0, samples, x, GRID[k])
            harness.close_to(stacked(samples, "x0"), x - harness.level(GRID[k]) * velocity)
            x = x + (harness.level(GRID[k + 1]) - harness.level(GRID[k])) * velocity

    def test_the_last_stop_step_is_the_whole_sampler(self, harness: Harness) -> None:
        """x0 of step N - 1 is where the Euler step to sigma 0 lands."""
        samples = harness.engine.generate(harness.requests(3, 3))
        x = stacked(samples, "x_k")
        landed = x - harness.level(GRID[3]) * harness.velocity(0, samples, x, GRID[3])
        torch.testing.assert_close(stacked(samples, "x0"), landed, rtol=0, atol=harness.same)

    def test_sde_hops_are_noised_afresh_from_the_samples_own_seed(self, harness: Harness) -> None:
        ode = harness.requests(0, 1, 2, 3, 3)
        requests = [dataclasses.replace(r, sample_type="sde") for r in ode]
        samples = harness.engine.generate(requests)
        for request, sample in zip(requests, samples, strict=True):
            x_k, x0 = by_hand(harness, request, sample.cond)
            torch.testing.assert_close(sample.x_k, x_k, rtol=0, atol=harness.same)
            torch.testing.assert_close(sample.x0, x0, rtol=0, atol=harness.same)
        euler = harness.engine.generate(ode)
        assert torch.equal(samples[0].x_k, euler[0].x_k), "step 0 starts from noise alone"
        assert all((a.x_k - b.x_k).abs().max() > 0.1 for a, b in zip(samples[1:], euler[1:], strict=True))

    def test_a_real_latent_is_noised_to_the_stop_steps_sigma(self, harness: Harness) -> None:
        """One forward each, at (1 - sigma_k) x + sigma_k noise; beside it rollouts from noise are what they were."""
        simulated, real = harness.requests(1, 3), real_latents(harness.adapter)
        noised = [
            dataclasses.replace(request, sample_id=50 + k, stop_step=k, real_latent=row)
            for k, (request, row) in enumerate(zip(harness.requests(0, 0, 0, 0), (2, 0, 1, 2), strict=True))
        ]
        alone, before = harness.engine.generate(simulated), harness.engine.forward_count
        samples = harness.engine.generate([*simulated, *noised])
        assert harness.engine.forward_count - before == 2 + 4 + 4
        assert all(torch.equal(a.x_k, b.x_k) for a, b in zip(alone, samples, strict=False))
        for request, sample in zip(noised, samples[2:], strict=True):
            sigma = GRID[request.stop_step]
            noise = harness.adapter.initial_noise(request.seed)
            level = harness.level(sigma)
            expected = (1 - level) * real[request.real_latent] + level * noise
            torch.testing.assert_close(sample.x_k, expected, rtol=0, atol=1e-6)
            velocity = harness.velocity(0, [sample], sample.x_k.unsqueeze(0), sigma)
            torch.testing.assert_close(sample.x0, sample.x_k - level * velocity[0], rtol=0, atol=harness.same)
            assert (sample.stop_step, tuple(sample.sigmas.tolist())) == (request.stop_step, GRID)
        with pytest.raises(ValueError, match="real_latent 3, this engine has 3"):
            harness.engine.generate([dataclasses.replace(noised[0], real_latent=3)])

    def test_stop_steps_do_not_disturb_each_other(self, harness: Harness) -> None:
        mixed = harness.engine.generate(harness.requests(3, 0, 2, 1))
        for request, sample in zip(harness.requests(3, 0, 2, 1), mixed, strict=True):
            (alone,) = harness.engine.generate([request])
            torch.testing.assert_close(sample.x0, alone.x0, rtol=0, atol=harness.same)

    @pytest.mark.parametrize("stop", range(4))
    def test_costs_one_forward_more_than_the_stop_step(self, harness: Harness, stop: int) -> None:
        before = harness.engine.forward_count
        harness.engine.generate(harness.requests(stop, stop, stop))
        assert harness.engine.forward_count - before == 3 * (stop + 1)

    def test_mixed_stop_steps_cost_their_sum(self, harness: Harness) -> None:
        before = harness.engine.forward_count
        harness.engine.generate(harness.requests(0, 1, 2, 3, 3))
        assert harness.engine.forward_count - before == 1 + 2 + 3 + 4 + 4

    def test_prompts_of_different_length_in_one_batch_equal_single_runs(self, harness: Harness) -> None:
        requests = harness.requests(2, 2, 2)
        together = harness.engine.generate(requests)
        for request, sample in zip(requests, together, strict=True):
            (alone,) = harness.engine.generate([request])
            torch.testing.assert_close(sample.x0, alone.x0, rtol=0, atol=harness.same)
            assert all(torch.equal(sample.cond[key], alone.cond[key]) for key in alone.cond)

    def test_grids_may_differ_within_a_call(self, harness: Harness) -> None:
        first, second = harness.requests(1, 1)
        other = tuple(sigma_grid(2, 1.0).tolist())
        samples = harness.engine.generate([first, dataclasses.replace(second, sigmas=other)])
        assert [len(sample.sigmas) for sample in samples] == [5, 3]
        (alone,) = harness.engine.generate([dataclasses.replace(second, sigmas=other)])
        torch.testing.assert_close(samples[1].x0, alone.x0, rtol=0, atol=harness.same)

    def test_a_trainer_can_recompute_x0_with_gradient(self, harness: Harness) -> None:
        samples = harness.engine.generate(harness.requests(2, 2))
        assert not any(t.requires_grad or t.is_inference() for s in samples for t in (s.x_k, s.x0, *s.cond.values()))
        x_k = stacked(samples, "x_k")
        module = copy.deepcopy(harness.reference).requires_grad_(True)
        cond = harness.adapter.collate([sample.cond for sample in samples])
        x0 = x_k - harness.level(GRID[2]) * harness.adapter.velocity(module, x_k, torch.full((2,), GRID[2]), cond)
        torch.testing.assert_close(x0, stacked(samples, "x0"), rtol=0, atol=harness.same)
        x0.square().sum().backward()
        assert any(p.grad is not None and bool(p.grad.any()) for p in module.parameters())


class EngineContract(SamplingContract):
    # -- conditioning ----------------------------------------------------------------------------------------

    def test_conditioning_is_what_the_samples_were_made_with(self, harness: Harness) -> None:
        """Also for the empty prompt, which no request may have but a teacher's guidance needs."""
        prompts = [*harness.prompts, harness.further, harness.prompts[0]]
        before = harness.engine.forward_count
        records = harness.engine.conditioning(prompts)
        assert harness.engine.forward_count == before
        assert len(records) == len(prompts)
        same, further = records[-1], records[-2]
        assert all(torch.equal(same[key], records[0][key]) for key in same)
        for other in records[:-2]:
            assert any(
                a.shape != b.shape or not torch.equal(a, b)
                for a, b in zip(further.values(), other.values(), strict=True)
            )
        assert {value.dtype for value in further.values()} <= {torch.float32, torch.bool, torch.int64}
        samples = harness.engine.generate(harness.requests(*[0] * len(harness.prompts)))
        for sample, record in zip(samples, records, strict=False):
            assert all(torch.equal(sample.cond[key], record[key]) for key in record)
            with_record = dataclasses.replace(sample, cond=record)
            velocity = harness.velocity(0, [with_record], sample.x_k.unsqueeze(0), GRID[0])
            torch.testing.assert_close(
                sample.x0, sample.x_k - harness.level(GRID[0]) * velocity[0], rtol=0, atol=harness.same
            )

    def test_no_prompts_no_conditioning(self, harness: Harness) -> None:
        assert harness.engine.conditioning([]) == []

    # -- media -----------------------------------------------------------------------------------------------

    def test_media_in_fp32_are_those_in_uint8_before_rounding(self, harness: Harness) -> None:
        request = harness.requests(3, decode=True)[0]
        (rounded,) = harness.engine.generate([request])
        (exact,) = harness.engine.generate([dataclasses.replace(request, video_dtype="fp32")])
        assert rounded.media is not None
        assert exact.media is not None
        assert exact.media.dtype == torch.float32
        assert 0 <= exact.media.min() < exact.media.max() <= 1
        assert torch.equal((exact.media * 255).round().to(torch.uint8), rounded.media) or not harness.exact

    def test_media_only_when_asked(self, harness: Harness) -> None:
        before = harness.decodes()
        plain = harness.engine.generate(harness.requests(3, 3))
        assert [sample.media for sample in plain] == [None, None]
        assert harness.decodes() == before
        first, second = harness.requests(3, 3, decode=True)
        with_media, without = harness.engine.generate([first, dataclasses.replace(second, decode=False)])
        assert without.media is None
        assert with_media.media is not None
        assert with_media.media.dtype == torch.uint8
        adapter = harness.adapter
        assert with_media.media.shape == (adapter.num_frames, adapter.height, adapter.width, 3)
        assert len(with_media.media.unique()) > 2
        assert torch.equal(with_media.x0, plain[0].x0) or not harness.exact

    # -- bad requests ----------------------------------------------------------------------------------------

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"stop_step": 4}, r"stop_step must be an int in \[0, 4\), got 4"),
            ({"stop_step": -1}, "stop_step"),
            ({"stop_step": True}, "stop_step"),
            ({"stop_step": 1.0}, "stop_step"),
            ({"seed": -1}, "seed"),
            ({"seed": 2**63}, "seed"),
            ({"prompt": " "}, "prompt"),
            ({"prompt": None}, "prompt"),
            ({"sigmas": (1.0,), "stop_step": 0}, "sigmas"),
            ({"sigmas": (1.0, 0.5), "stop_step": 0}, "end with 0"),
            ({"sigmas": (1.0, 0.5, 0.5, 0.0), "stop_step": 0}, "decrease"),
            ({"sigmas": (1.0, float("nan"), 0.0), "stop_step": 0}, "decrease"),
            ({"sigmas": (2.0, 0.5, 0.0), "stop_step": 0}, "sigmas"),
            ({"sample_id": 10}, "twice"),
            ({"sample_id": -1}, "sample_id"),
        ],
    )
    def test_a_request_that_cannot_be_served_is_refused(
        self, harness: Harness, change: dict[str, object], message: str
    ) -> None:
        first, second = harness.requests(1, 1)
        before = harness.engine.forward_count
        with pytest.raises(ValueError, match=message) as caught:
            harness.engine.generate([first, dataclasses.replace(second, **change)])
        assert f"sample {change.get('sample_id', 11)}" in str(caught.value)
        assert harness.engine.forward_count == before

    # -- weights ---------------------------------------------------------------------------------------------

    def test_new_weights_are_served_and_named(self, harness: Harness) -> None:
        old = harness.engine.generate(harness.requests(2, 2))
        update, tensors = harness.weights(1, "ema")
        harness.engine.load_weights(update, tensors)
        assert harness.engine.weight_version == WeightVersion(1, "ema")
        assert harness.engine.weight_checksum == update.checksum
        new = harness.engine.generate(harness.requests(2, 2))
        assert {sample.weight_version for sample in new} == {WeightVersion(1, "ema")}
        assert (stacked(new, "x0") - stacked(old, "x0")).abs().max() > 1e-3
        x_k = stacked(new, "x_k")
        harness.close_to(stacked(new, "x0"), x_k - harness.level(GRID[2]) * harness.velocity(1, new, x_k, GRID[2]))
        harness.load(0)
        assert all_equal(harness.engine.generate(harness.requests(2, 2)), old)

    def test_loading_costs_no_student_forward(self, harness: Harness) -> None:
        before = harness.engine.forward_count
        harness.load(1)
        assert harness.engine.forward_count == before

    def test_the_caller_may_reuse_its_tensors(self, harness: Harness) -> None:
        update, tensors = harness.weights(1)
        harness.engine.load_weights(update, tensors)
        served = harness.engine.generate(harness.requests(1))
        for value in tensors.values():
            value.zero_()
        assert all_equal(harness.engine.generate(harness.requests(1)), served)

    @pytest.mark.parametrize("fault", FAULTS)
    def test_weights_with_a_fault_are_refused_and_the_old_ones_serve_on(self, harness: Harness, fault: str) -> None:
        harness.load(1)
        before = harness.engine.weight_version, harness.engine.weight_checksum
        samples = harness.engine.generate(harness.requests(2, 0))
        with pytest.raises(EngineError, match="raw@2 refused"):
            harness.engine.load_weights(*spoil(harness.weights(2), fault, harness.unseen()))
        assert (harness.engine.weight_version, harness.engine.weight_checksum) == before
        assert all_equal(harness.engine.generate(harness.requests(2, 0)), samples)
        harness.load(2)
        assert harness.engine.weight_version == WeightVersion(2)

    # -- sleep -----------------------------------------------------------------------------------------------

    def test_asleep_nothing_works_and_awake_everything_is_as_before(self, harness: Harness) -> None:
        engine, requests = harness.engine, harness.requests(2, 0, decode=True)
        before = engine.generate(requests)
        update, tensors = harness.weights(1)
        for _ in range(3):
            engine.sleep()
            for call in (
                lambda: engine.generate(requests),
                lambda: engine.generate([]),
                lambda: engine.conditioning(harness.prompts),
                lambda: engine.load_weights(update, tensors),
                engine.sleep,
            ):
                with pytest.raises(EngineError, match="asleep"):
                    call()
            assert engine.weight_version == WeightVersion(0)
            engine.wake()
            assert all_equal(engine.generate(requests), before)

    def test_wake_is_no_effect_when_awake(self, harness: Harness) -> None:
        before = harness.engine.generate(harness.requests(1))
        harness.engine.wake()
        assert all_equal(harness.engine.generate(harness.requests(1)), before)

    def test_new_weights_after_waking_survive_the_next_sleep(self, harness: Harness) -> None:
        harness.engine.sleep()
        harness.engine.wake()
        harness.load(1)
        before = harness.engine.generate(harness.requests(1))
        harness.engine.sleep()
        harness.engine.wake()
        assert all_equal(harness.engine.generate(harness.requests(1)), before)
