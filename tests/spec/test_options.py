"""Options as JSON: what is written comes back, and nothing else is read."""

import json

import pytest

from dali_tf_input import DaliOptions, InputError, TfDataOptions, load_options, save_options


@pytest.mark.parametrize(
    "options",
    [
        TfDataOptions(),
        TfDataOptions(num_parallel_calls=4, decode="scaled", read_buffer_bytes=9),
        TfDataOptions(service="grpc://host:1"),
        DaliOptions(device="cpu", num_threads=3, read_mode="direct"),
        DaliOptions(device="gpu", hw_decoder_load=0.75, memory_hints=False, read_ahead=True),
    ],
)
def test_options_come_back_from_their_file(tmp_path, options):
    path = str(tmp_path / "options.json")
    save_options(options, path, about={"gain": 1.5})
    assert load_options(path) == options
    assert [file.name for file in tmp_path.iterdir()] == ["options.json"]


def dali(**changes):
    return {"backend": "dali", "options": {"device": "cpu", **changes}}


def tf_data(**changes):
    return {"backend": "tf_data", "options": changes}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "is not an options file of this version: [Errno 2]"),
        ("{", "is not an options file"),
        ("[]", "is not an options file"),
        ('{"format": "other", "version": 2}', "Invalid enum value 'other'"),
        ({"backend": "torch", "options": {}}, "Invalid enum value 'torch'"),
        (tf_data(num_threads=2), "TfDataOptions has no field `num_threads`. Tune again"),
        (dali(num_threads=0), "`num_threads` must be at least 1 or None, got 0"),
        ({"backend": "dali", "options": {"device": "cpu", "num_threads": "2"}}, "$.num_threads"),
        ({"backend": "dali", "options": {"device": "cpu", "num_threads": 1.5}}, "$.num_threads"),
        ({"backend": "dali", "options": {"device": "cpu", "read_ahead": 1}}, "$.read_ahead"),
        ({"backend": "dali", "options": {"device": 1}}, "$.device"),
        ({"backend": "tf_data", "options": {"service": 5}}, "$.service"),
        ({"backend": "tf_data", "options": {"autotune": "no"}}, "$.autotune"),
        ({"backend": "tf_data", "options": {"num_parallel_calls": True}}, "$.num_parallel_calls"),
        ({"backend": "dali", "options": {}}, "device"),
    ],
)
def test_files_that_hold_no_options(tmp_path, text, message):
    path = tmp_path / "options.json"
    if text is not None:
        head = {"format": "dali_tf_input options", "version": 2}
        path.write_text(text if isinstance(text, str) else json.dumps(head | text))
    with pytest.raises(InputError) as caught:
        load_options(str(path))
    assert str(caught.value).startswith(f"{path}")
    assert message in str(caught.value)
