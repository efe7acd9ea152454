"""A function for other processes, in a module of its own: that it is imported there takes no
second.
"""

import gc

from dali_tf_input.cli.convert.writer import Record


def make_kilobytes(numbers: list[int]) -> list[Record]:
    if not numbers[0]:
        gc.collect()
    return [Record(bytes([number % 256]) * 1000, str(number)) for number in numbers]
