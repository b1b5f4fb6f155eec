"""Audio features, computed by the feature extractors of audio families."""

from collections.abc import Mapping
from typing import Any

import torch
import transformers

from triptych.engine.media.item import MediaItem
from triptych.families.model_files import BadModel, ModelFiles


class WhisperFeatures:
    """A checkpoint's ``WhisperFeatureExtractor``."""

    def __init__(self, files: ModelFiles) -> None:
        """Raises BadModel."""
        settings = dict(files.feature_extractor)
        kind = settings.get("feature_extractor_type", "WhisperFeatureExtractor")
        if kind != "WhisperFeatureExtractor":
            raise BadModel(f"the feature extractor is {kind!r}, not 'WhisperFeatureExtractor'")
        extractor: Any = transformers.WhisperFeatureExtractor
        try:
            self._extractor = extractor.from_dict(settings)
        except (ValueError, TypeError) as error:
            raise BadModel(f"the feature extractor cannot be made: {error}") from error

    @property
    def settings(self) -> Mapping[str, Any]:
        settings: Mapping[str, Any] = self._extractor.to_dict()
        return settings

    def extract(self, item: MediaItem, **options: Any) -> dict[str, torch.Tensor]:
        """The extractor's tensors for one clip, without their batch dimension; ``options`` are its own.

        Thread-safe. Raises InvalidMedia.
        """
        rate = self._extractor.sampling_rate
        samples = item.samples(rate)
        batch = self._extractor(samples, sampling_rate=rate, return_tensors="pt", **options)
        return {name: value[0] for name, value in batch.items()}
