"""Records as tfds writes them, by its own writer."""

import numpy as np
import pytest
import tensorflow as tf
from conftest import TF_DATA

import dali_tf_input as dti

pytestmark = pytest.mark.usefixtures("checked_here")


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
