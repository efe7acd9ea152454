"""The tf.data backend by batch: one operation reads, decodes and preprocesses a batch.

Images that the operation refuses are made one by one, see `tf_views`. `tf_data` makes single images
where batches cannot be made, see `makes_batches`.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from dali_tf_input.backends import reading, tf_native
from dali_tf_input.backends.locations import RecordLocations, find_locations
from dali_tf_input.backends.parsing import decode_mask, parse_image, parse_others
from dali_tf_input.backends.stream import Stream
from dali_tf_input.backends.tf_augment import make_rows
from dali_tf_input.backends.tf_images import is_mirrored, normalize_image, prepare_mask
from dali_tf_input.backends.tf_mix import draw_mix, mix_labels
from dali_tf_input.backends.tf_views import make_plain, make_views
from dali_tf_input.random import Purpose, seed_of
from dali_tf_input.records.checks import SIZE_KEYS
from dali_tf_input.spec.input import InputSpec
from dali_tf_input.spec.options import TfDataOptions
from dali_tf_input.spec.primitives import ROW_SIZE

# Batches made at the same time. The threads of the process take image by image from them, so two
# keep any number of cores busy: when the last images of one are being made, the other has begun.
PARALLEL_BATCHES = 2

Transform = Callable[..., tf.Tensor]


def makes_batches(spec: InputSpec, options: TfDataOptions) -> bool:
    """Returns whether `make_batches` can make the batches of a spec.

    It cannot with crops that the operation does not know, nor in the processes of a service.
    """
    return (
        options.service is None
        and all(tf_native.decodes(view.crop) for view in spec.image_views.values())
        and tf_native.uses_native(options.kernel)
    )


def make_batches(
    stream: Stream, options: TfDataOptions, transforms: Sequence[Transform | None]
) -> tf.data.Dataset:
    """Makes the dataset of a shard's batches, as `InputSpec.arrange` arranges them.

    Args:
      stream: a stream with a spec that `makes_batches`.
      options: the options of the backend.
      transforms: `spec.transform` for each view, see `tf_data.check_transform`.
    """
    locations = find_locations(stream.spec.records)  # for the maker and for the reading
    make = _BatchMaker(stream, options, transforms, locations)
    return reading.map_batches(
        stream,
        options,
        make,
        num_calls=1 if options.num_parallel_calls == 1 else PARALLEL_BATCHES,
        num_threads=PARALLEL_BATCHES + make.num_threads,
        as_records=make.needs_images,
    )


def draw_uniforms(stream: Stream, keys: tf.Tensor, view: int) -> tf.Tensor:
    """Draws the numbers of `stream.draw_uniforms` for many keys: float32 (k, num_uniforms)."""
    preprocess = [*stream.spec.image_views.values()][view]
    seed = seed_of(stream.spec.seed, Purpose.CROP, view)
    return tf_native.draw_uniforms(keys, seed, preprocess.num_uniforms)


def draw_rows(stream: Stream, keys: tf.Tensor, view: int) -> tf.Tensor:
    """Draws the rows of augmentation for many keys, float32 (k, r, ROW_SIZE)."""
    preprocess = [*stream.spec.image_views.values()][view]
    if not preprocess.augment:
        return tf.zeros((tf.size(keys), 0, ROW_SIZE))
    program = preprocess.make_program()
    seed = seed_of(stream.spec.seed, Purpose.AUGMENT, view)
    return make_rows(program, tf_native.draw_uniforms(keys, seed, program.num_uniforms))


class _BatchMaker:
    """Makes batches of a stream, given their keys and records."""

    def __init__(
        self,
        stream: Stream,
        options: TfDataOptions,
        transforms: Sequence[Transform | None],
        locations: RecordLocations,
    ) -> None:
        self._stream, self._options, self._transforms = stream, options, transforms
        calls = options.num_parallel_calls
        self.num_threads = len(os.sched_getaffinity(0)) if calls == tf.data.AUTOTUNE else calls
        self._views = [*stream.spec.image_views.values()]
        # What the operation makes of each image; of some, TensorFlow makes the rest.
        self._made = [
            view
            if view.channels == 3 and not transform
            else make_plain(view, changes=bool(view.augment or transform))
            for view, transform in zip(self._views, transforms, strict=True)
        ]
        # The operation returns Examples without their images.
        keys = {
            *stream.spec.features,
            *(one.key for one in (stream.spec.label, stream.spec.mask) if one),
        }
        self.needs_images = not keys.isdisjoint(stream.spec.records.image_keys)
        self._files = (locations.names, locations.versions, *locations.where)
        view = self._views[0]
        decode = options.resolve_decode(resizes_plainly=view.resizes_plainly)
        self._limits = tf_native.limits_of(view, decode=decode)
        if stream.spec.views:  # of one image, decoded as far as all of them need
            self._limits = {"whole": options.decode == "full", "maximum": math.inf}

    def __call__(
        self,
        keys: tf.Tensor,
        positions: tf.Tensor,
        records: tf.Tensor,
        from_index: tuple[tf.Tensor, ...],
    ) -> Any:
        """Returns a batch, arranged; see `reading.MakeBatch`."""
        spec, options = self._stream.spec, self._options
        views = range(len(self._views))
        uniforms = [draw_uniforms(self._stream, keys, view) for view in views]
        rows = [draw_rows(self._stream, keys, view) for view in views]
        drawn = draw_mix(self._stream, keys[0]) if spec.mix else tf.constant([])
        # Images are mixed when they are finished, which is not always by the operation.
        mixes_there = self._made[0] is self._views[0]
        drawn_there = drawn if mixes_there else tf.constant([])
        given = tf.concat(uniforms, 1), tf.concat(rows, 1)
        made = tf_native.make_batch(
            self._files,
            positions,
            records,
            *given,
            drawn_there,
            self._made,
            image_keys=spec.records.image_keys,
            size_keys=SIZE_KEYS if spec.records.stores_pixels else (),
            check_crc=options.check_crc,
            num_readers=options.num_parallel_reads,
            num_threads=self.num_threads,
            **self._limits,
        )
        images, sizes = tf.cond(
            tf.equal(tf.size(made.refused_indices), 0),
            lambda: (made.images, made.sizes),
            lambda: self._make_refused(made, *given, drawn_there),
        )
        examples = made.examples
        if self.needs_images:
            # Only after the operation, which refuses what would crash TensorFlow's parser.
            with tf.control_dependencies([made.examples]):
                examples = tf.identity(records)
        values = parse_others(examples, spec, from_index)
        for view, name in enumerate(spec.image_views):
            values[name] = self._finish(images[view], uniforms[view], keys, view)
        if spec.mask:
            values["mask"] = self._make_masks(values["mask"], sizes, uniforms[0], rows[0])
        if spec.mix:
            values["label"] = mix_labels(values["label"], drawn)
            if not mixes_there:
                values["image"] = tf_native.mix(values["image"], drawn, spec.preprocess)
        size = self._stream.shard_batch_size if spec.repeat else None
        values = {
            name: tf.ensure_shape(value, (size, *value.shape[1:])) for name, value in values.items()
        }
        return spec.arrange(values)

    def _make_refused(
        self, made: tf_native.NativeBatch, uniforms: tf.Tensor, rows: tf.Tensor, drawn: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Makes the images that the operation refused.

        Returns the batch with them, and the sizes of all images, as `NativeBatch` has them.
        """
        spec = self._stream.spec

        def make_one(given: tuple[tf.Tensor, ...]) -> tuple[list[tf.Tensor], tf.Tensor]:
            record, uniforms, rows = given
            image = parse_image(record, spec)
            return make_views(image, uniforms, rows, self._made, **self._limits)

        types = [tf.TensorSpec(view.image_shape, view.dtype) for view in self._made]
        given = [tf.gather(values, made.refused_indices) for values in (uniforms, rows)]
        images, sizes = tf.map_fn(
            make_one,
            (made.refused, *given),
            fn_output_signature=(types, tf.TensorSpec((3,), tf.int64)),
            parallel_iterations=self.num_threads,
        )
        pasted = [
            tf_native.paste_images(batch, own, made.refused_indices, drawn, view)
            for batch, own, view in zip(made.images, images, self._made, strict=True)
        ]
        places = made.refused_indices[:, None]
        return pasted, tf.tensor_scatter_nd_update(made.sizes, places, sizes)

    def _make_masks(
        self, masks: tf.Tensor, sizes: tf.Tensor, uniforms: tf.Tensor, rows: tf.Tensor
    ) -> tf.Tensor:
        """Makes the masks of a batch, one by one, which are stored as strings (k,)."""
        spec = self._stream.spec
        return tf.map_fn(
            lambda given: prepare_mask(decode_mask(given[0], given[1]), given[2], given[3], spec),
            (masks, sizes, uniforms, rows),
            fn_output_signature=tf.TensorSpec(spec.preprocess.image_size, tf.int32),
            parallel_iterations=self.num_threads,
        )

    def _finish(
        self, images: tf.Tensor, uniforms: tf.Tensor, keys: tf.Tensor, view: int
    ) -> tf.Tensor:
        """Does what the operation does not: a user's transform, gray."""
        preprocess, made, transform = self._views[view], self._made[view], self._transforms[view]
        if made is preprocess:
            return images
        if transform:
            seed = seed_of(self._stream.spec.seed, Purpose.TRANSFORM, view)
            seeds = tf.stack([tf.fill(tf.shape(keys), tf.constant(seed, tf.int64)), keys], 1)
            is_last = preprocess.channels == 3  # one pass over an image, not several over the batch

            def change(given: tuple[tf.Tensor, ...]) -> tf.Tensor:
                image, seed, own = given
                image = transform(image, seed)
                if not is_last:
                    return image
                mirrored = is_mirrored(own, preprocess)
                return tf_native.augment(image, tf.zeros((0, ROW_SIZE)), preprocess, mirrored)

            kind = preprocess if is_last else made
            images = tf.map_fn(
                change,
                (images, seeds, uniforms),
                fn_output_signature=tf.TensorSpec(kind.image_shape, kind.dtype),
                parallel_iterations=self.num_threads,
            )
            if is_last:
                return images
        return normalize_image(images, uniforms, preprocess)
