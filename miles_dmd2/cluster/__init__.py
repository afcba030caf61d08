"""Ray: placement, actors around trainers and engines, and the groups the driver talks to. The only importer of ray."""
