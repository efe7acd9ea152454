"""Records as others write them: tfds by its own writer, TF-slim, the Object Detection API."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import TF_DATA, jpeg

import dali_tf_input as dti

SIZES = [(40 + number, 50) for number in range(7)]


def feature(*values):
    """Returns a feature as `tf.train.Example` has it."""
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def write(path, examples):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for features in examples:
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString())


def slim(number, size):
    """As build_imagenet_data.py does: classes from 1, boxes of any number."""
    boxes = {"xmin": 0.1, "xmax": 0.9, "ymin": 0.2, "ymax": 0.8}
    boxes = {
        f"image/object/bbox/{side}": feature(*[at] * (number % 3 + 1)) for side, at in boxes.items()
    }
    return {
        **boxes,
        "image/height": feature(size[0]),
        "image/width": feature(size[1]),
        "image/colorspace": feature(b"RGB"),
        "image/channels": feature(3),
        "image/class/label": feature(number % 3 + 1),
        "image/class/synset": feature(b"n01440764"),
        "image/class/text": feature(b"tench, Tinca tinca"),
        "image/object/bbox/label": feature(*[number % 3 + 1] * (number % 3 + 1)),
        "image/format": feature(b"JPEG"),
        "image/filename": feature(b"n01440764_%d.JPEG" % number),
        "image/encoded": feature(jpeg(*size, seed=number)),
    }


def detection(number, size):
    """As create_pascal_tf_record.py does: several classes to an image, none of its own."""
    count = number % 3 + 1
    return {
        "image/height": feature(size[0]),
        "image/width": feature(size[1]),
        "image/filename": feature(b"%d.jpg" % number),
        "image/source_id": feature(b"%d.jpg" % number),
        "image/key/sha256": feature(b"0" * 64),
        "image/encoded": feature(jpeg(*size, seed=number)),
        "image/format": feature(b"jpeg"),
        "image/object/bbox/xmin": feature(*[0.1] * count),
        "image/object/class/text": feature(*[b"dog"] * count),
        "image/object/class/label": feature(*range(1, count + 1)),
        "image/object/difficult": feature(*[0] * count),
    }


def serve(pattern, **fields):
    """Returns the labels of an epoch, and the boxes that come with them."""
    spec = dti.InputSpec.for_evaluation(pattern, 32, **fields)
    return next(iter(dti.load(spec, TF_DATA, batch_size=7)))


@pytest.mark.slow
def test_slim(tmp_path):
    write(tmp_path / "train-00000-of-00001", map(slim, range(7), SIZES))
    label = dti.ClassLabel(num_classes=3, offset=1)
    dti.build_index(tmp_path / "train-*", dti.Checks(verify="schema", label=label))
    side = dti.Stored(size=3, padding=-1.0)
    x, y = serve(tmp_path / "train-*", label=label, features={"image/object/bbox/xmin": side})
    assert y.numpy().tolist() == [number % 3 for number in range(7)]
    assert (x["image/object/bbox/xmin"].numpy() > 0).sum(axis=1).tolist() == [
        number % 3 + 1 for number in range(7)
    ]


@pytest.mark.slow
def test_object_detection(tmp_path):
    """The classes of an image's objects as one multi-hot vector."""
    write(tmp_path / "pascal_train.record-00000-of-00001", map(detection, range(7), SIZES))
    pattern = tmp_path / "pascal_train.record-*"
    label = dti.MultiHot(num_classes=3, key="image/object/class/label", offset=1)
    dti.build_index(pattern, dti.Checks(verify="schema", label=label))
    _, y = serve(pattern, label=label)
    expected = [
        [1.0 if column <= number % 3 else 0.0 for column in range(3)] for number in range(7)
    ]
    assert y.numpy().tolist() == expected


@pytest.mark.slow
def test_tfds(tmp_path):
    """By its own writer, with what it writes beside the records; the images and labels are its."""
    import tensorflow_datasets as tfds

    box = tfds.features.BBox(0.0, 0.0, 1.0, 1.0)

    class Shapes(tfds.core.GeneratorBasedBuilder):
        """A dataset of random images."""

        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            features = {
                "image": tfds.features.Image(encoding_format="jpeg"),
                "image/filename": tfds.features.Text(),
                "label": tfds.features.ClassLabel(names=["circle", "square", "star"]),
                "objects": tfds.features.Sequence({"bbox": tfds.features.BBoxFeature()}),
            }
            return tfds.core.DatasetInfo(
                builder=self, features=tfds.features.FeaturesDict(features)
            )

        def _split_generators(self, dl_manager):
            return {"train": self._generate_examples(20), "validation": self._generate_examples(7)}

        def _generate_examples(self, count):
            generator = np.random.default_rng(count)
            for number in range(count):
                yield (
                    number,
                    {
                        "image": generator.integers(0, 255, (40 + number, 50, 3), np.uint8),
                        "image/filename": f"{number}.jpg",
                        "label": number % 3,
                        "objects": [{"bbox": box}] * (number % 3),
                    },
                )

    builder = Shapes(data_dir=tmp_path)
    builder.download_and_prepare()
    folder = tmp_path / "shapes/1.0.0"
    report = dti.build_index(folder / "*.tfrecord-*", dti.Checks(verify="decode"))
    assert (report.summary.files, report.summary.records) == (2, 27)
    whole = dti.Preprocess(image_size=(32, 32), mean=(0, 0, 0), std=(1, 1, 1))
    for split, count in (("train", 20), ("validation", 7)):
        spec = dti.InputSpec.for_evaluation(folder / f"shapes-{split}.tfrecord-*", whole)
        ((x, y),) = dti.load(spec, TF_DATA, batch_size=count)
        theirs = list(builder.as_dataset(split=split))
        assert y.numpy().tolist() == [example["label"] for example in theirs]
        for image, example in zip(x, theirs, strict=True):
            expected = tf.image.resize(example["image"], (32, 32))  # by the faster inverse DCT
            assert np.abs(image - expected).mean() < 1.5
    assert spec.records.class_names == ("circle", "square", "star")
