"""Trial decoding in a child process, as a damaged image may crash or hang a decoder."""

import dataclasses
import functools
import importlib.util
import logging

from dali_tf_input.errors import InputError
from dali_tf_input.processes import Child, ChildDiedError
from dali_tf_input.records.checks import Checks, Decoder, InvalidRecord, TrialDecode
from dali_tf_input.records.installing import DALI, pip_install

_LONGEST_SECONDS = 900.0  # for one image

_logger = logging.getLogger("dali_tf_input")

Decoded = tuple[str, int, int] | InvalidRecord  # format, height and width, or what is wrong


def choose_decoder(checks: Checks) -> Checks:
    """Returns checks by the decoders that are installed, where they ask for both.

    Raises:
      InputError: DALI's is asked for, and is not installed.
    """
    if checks.verify != "decode" or checks.decoder == "tf_data" or _has_dali_decoder():
        return checks
    remedy = pip_install(DALI)
    if checks.decoder == "dali":
        raise InputError(
            f"DALI's decoder, nvImageCodec, is not installed: {remedy}; or check with TensorFlow's"
            " alone: --decoder=tf_data"
        )
    _tell_once(
        "DALI's decoder, nvImageCodec, is not installed: images are checked by TensorFlow's alone."
        f" To check with both: {remedy}"
    )
    return dataclasses.replace(checks, decoder="tf_data")


def _has_dali_decoder() -> bool:
    try:
        return importlib.util.find_spec("nvidia.nvimgcodec") is not None
    except ModuleNotFoundError:  # not even nvidia
        return False


@functools.cache
def _tell_once(text: str) -> None:
    _logger.warning("%s", text)


class DecodingChild:
    """A `TrialDecode` function, by `decoder` and `max_pixels` of some checks.

    An image that crashes the decoder, or takes longer than a quarter of an hour, is not valid. The
    next one is decoded by a new process. Several images in one call take less time.

    Raises:
      InputError: a decoder is not installed, or the process does not start. That says nothing of
        the images.
    """

    def __init__(self, checks: Checks, *, idle_seconds: float | None = None) -> None:
        self._how = (checks.decoder, checks.max_pixels)
        self._child = Child(idle_seconds=idle_seconds)
        try:
            self._child.call(_prepare, *self._how)
        except ChildDiedError as error:
            raise InputError(f"The process that decodes images does not start: {error}.") from error

    def __call__(self, encoded: bytes) -> tuple[str, int, int]:
        """Returns format, height and width of an image; raises InvalidRecord."""
        (result,) = self.decode_all([encoded])
        if isinstance(result, InvalidRecord):
            raise result
        return result

    def decode_all(self, images: list[bytes]) -> list[Decoded]:
        """Returns format, height and width of each image, or what is wrong with it."""
        try:
            results: list[Decoded]
            longest = _LONGEST_SECONDS * max(1, len(images))
            results = self._child.call(_decode, *self._how, data=images, seconds=longest)
            return results
        except ChildDiedError as error:
            if error.cause == "end":
                raise InputError(f"The process that decodes images was ended: {error}.") from error
            if len(images) > 1:  # one of them did that: each by itself
                return [result for image in images for result in self.decode_all([image])]
            if error.cause == "timeout":
                detail = f"decoding it did not end within {_LONGEST_SECONDS:.0f} s."
                return [InvalidRecord("hangs the decoder", detail)]
            detail = f"decoding it ended the process: {error}."
            return [InvalidRecord("crashes the decoder", detail)]

    def close(self) -> None:
        """Ends the process."""
        self._child.close()


@functools.cache
def _make_decode(decoder: Decoder, max_pixels: int) -> TrialDecode:
    # Imported here, in the child: Pillow, DALI's codecs and TensorFlow take seconds.
    from PIL import Image

    from dali_tf_input.index.decoders import make_trial_decode_of_worker

    Image.MAX_IMAGE_PIXELS = None  # in this process `max_pixels` is the limit
    return make_trial_decode_of_worker(Checks(decoder=decoder, max_pixels=max_pixels))


def _prepare(decoder: Decoder, max_pixels: int) -> None:
    _make_decode(decoder, max_pixels)


def _decode(decoder: Decoder, max_pixels: int, images: list[bytes]) -> list[Decoded]:
    decode, results = _make_decode(decoder, max_pixels), list[Decoded]()
    for image in images:
        try:
            results.append(decode(image))
        except InvalidRecord as bad:
            results.append(bad)
    return results
