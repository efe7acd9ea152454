"""Options as a Python expression, as `compare_throughput.py --tune` prints them."""

import pytest

import dali_tf_input as dti
from support.throughput.tuning import as_python


@pytest.mark.parametrize(
    ("options", "expression"),
    [
        (dti.TfDataOptions(), "TfDataOptions()"),
        (
            dti.TfDataOptions(num_parallel_calls=4, decode="region", read_buffer_bytes=9),
            "TfDataOptions(read_buffer_bytes=9, num_parallel_calls=4, decode='region')",
        ),
        (dti.TfDataOptions(num_parallel_calls=-1), "TfDataOptions()"),
        (dti.DaliOptions(device="cpu"), "DaliOptions(device='cpu')"),
        (
            dti.DaliOptions(device="gpu", hw_decoder_load=0.75, read_ahead=True),
            "DaliOptions(device='gpu', read_ahead=True, hw_decoder_load=0.75)",
        ),
    ],
)
def test_an_expression_makes_the_options_again(options, expression):
    assert as_python(options) == expression
    names = {"TfDataOptions": dti.TfDataOptions, "DaliOptions": dti.DaliOptions}
    assert eval(expression, names) == options
