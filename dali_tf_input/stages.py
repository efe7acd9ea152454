"""The stages that an image goes through in either backend, and after which a pipeline can be cut to measure what each costs."""

from typing import Literal, get_args

Stage = Literal["read", "parse", "decode", "resize", "finish"]

# What a pipeline that is cut after a stage serves of each image is one number, which nothing but that stage's result decides: so
# that what comes after, batching included, costs nothing, and nothing before can be left out.
STAGES: tuple[Stage, ...] = get_args(Stage)
