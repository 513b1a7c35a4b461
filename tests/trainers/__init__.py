"""The integrations against the trainers' real, unmodified source, which is never stored here.

`TRAINERS=<folder> bash ci/trainers.sh`, where the folder holds checkouts named `slime` and `miles`;
without it these tests say so and are skipped. verl is taken where it is installed, or from a work
tree `verl` in the folder.
"""
