"""Trial decoding in a child process, as a damaged image may crash or hang a decoder."""

import functools

from dali_tf_input.errors import InputError
from dali_tf_input.processes import Child, ChildDiedError
from dali_tf_input.records.checks import Checks, Decoder, InvalidRecord, TrialDecode

_LONGEST_SECONDS = 900.0  # for one image


class DecodingChild:
    """A `TrialDecode` function, by `decoder` and `max_pixels` of some checks.

    An image that crashes the decoder, or takes longer than a quarter of an hour, is not valid. The
    next one is decoded by a new process.

    Raises:
      InputError: a decoder is not installed. That says nothing of the images.
    """

    def __init__(self, checks: Checks, *, idle_seconds: float | None = None) -> None:
        self._how = (checks.decoder, checks.max_pixels)
        self._child = Child(idle_seconds=idle_seconds)
        self._child.call(_prepare, *self._how)

    def __call__(self, encoded: bytes) -> tuple[str, int, int]:
        """Returns format, height and width of an image; raises InvalidRecord."""
        try:
            given = (*self._how, encoded)
            image: tuple[str, int, int]
            image = self._child.call(_decode, *given, seconds=_LONGEST_SECONDS)
            return image
        except ChildDiedError as error:
            if error.cause == "timeout":
                detail = f"decoding it did not end within {_LONGEST_SECONDS:.0f} s."
                raise InvalidRecord("hangs the decoder", detail) from error
            if error.cause == "crash":
                detail = f"decoding it ended the process: {error}."
                raise InvalidRecord("crashes the decoder", detail) from error
            raise InputError(f"The process that decodes images was ended: {error}.") from error

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


def _decode(decoder: Decoder, max_pixels: int, encoded: bytes) -> tuple[str, int, int]:
    return _make_decode(decoder, max_pixels)(encoded)
