"""SGLang as the rollout engine, the trainer's side: servers, and the client of them. `engine` is where to begin."""
