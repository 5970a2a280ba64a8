"""Transforms that work from the encoded bytes, with torchvision's names, arguments and results.

The first one in a pipeline has the loader decode only what it needs: a JPEG's decoder stops after the last row of the
crop, and where a crop is at least twice its target, decodes at a half, a quarter or an eighth of the size (the scaled
inverse DCT of libjpeg). Results are those of torchvision on the PIL image, but for 1 or 2 of 255 in rounding, or with
scaled decoding a little more (``exact=True`` forbids it).

In a :class:`~shardstore.ShardDataset` their randomness is keyed by (seed, epoch, sample): an epoch has the same crops
on any number of workers, ranks and threads, and after a resume. Elsewhere torch's generator is asked.

All of them take a PIL image, an array (height, width, channels) or a tensor (channels, height, width), and give a
tensor uint8 (3, height, width), so that torchvision's own transforms of tensors go on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shardstore.errors import OptionError
from shardstore.pictures import images
from shardstore.pictures.opening import MAX_PIXELS

Size = tuple[int, int]
Box = tuple[int, int, int, int]  # y, x, height, width
_SCALES = (8, 4, 2)


class Random:
    """Numbers that follow from a key: SplitMix64 (Steele, Lea and Flood, 2014)."""

    def __init__(self, key: int) -> None:
        self._state = key & _MASK

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        """The next number, evenly from low to high."""
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        x = self._state
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        return low + (high - low) * ((x ^ (x >> 31)) >> 11) / (1 << 53)

    def below(self, n: int) -> int:
        """The next integer, evenly from 0 to n - 1."""
        return min(int(self.uniform() * n), n - 1)


_MASK = (1 << 64) - 1


class Transform:
    """What all of these have in common: they can be called with a picture, and decode one for themselves."""

    def __call__(self, image: Any) -> Any:
        """Transform a PIL image, array or tensor; at random by torch's generator."""
        return self.apply(_tensor(image), Random(int(torch.randint(1 << 62, ()).item())))

    def apply(self, image: torch.Tensor, random: Random) -> torch.Tensor:
        """Transform a tensor (channels, height, width)."""
        raise NotImplementedError

    def decode(self, data: bytes, random: Random, checked: bool = False, max_pixels: int = MAX_PIXELS) -> torch.Tensor:
        """Decode a picture file, of at most ``max_pixels``, and transform it; ``checked`` if it is known to be a good
        one, unchanged."""
        return self.apply(_tensor(images.decode(data, max_pixels)), random)


class _Cropping(Transform):
    """Cuts out a box and brings it to a size."""

    exact: bool = False

    def box(self, height: int, width: int, random: Random) -> tuple[Box, Size]:
        """What is cut from a picture of this size, and the size that it is brought to."""
        raise NotImplementedError

    def apply(self, image: torch.Tensor, random: Random) -> torch.Tensor:
        """Cut and resize."""
        (y, x, h, w), size = self.box(image.shape[-2], image.shape[-1], random)
        return _resized(image[..., y : y + h, x : x + w], size)

    def decode(self, data: bytes, random: Random, checked: bool = False, max_pixels: int = MAX_PIXELS) -> torch.Tensor:
        """Decode what is cut, and resize it."""
        header = images.probe(data, max_pixels)
        (y, x, h, w), size = self.box(*header.shape[:2], random)
        scale = 1 if self.exact else next((s for s in _SCALES if h >= s * size[0] and w >= s * size[1]), 1)
        array = images.decode_part(data, y + h if checked else None, scale, max_pixels)
        top, left, bottom, right = (round(n / scale) for n in (y, x, y + h, x + w))
        return _resized(_tensor(array[top:bottom, left:right]), size)


@dataclass(frozen=True)
class RandomResizedCrop(_Cropping):
    """A crop of random area and aspect ratio, brought to one size.

    Attributes:
        size: of the result: (height, width), or one number for both.
        scale: least and greatest area of the crop, as a part of the picture.
        ratio: least and greatest aspect ratio, width by height.
        exact: forbid scaled decoding.
    """

    size: int | Size
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    exact: bool = False

    def box(self, height: int, width: int, random: Random) -> tuple[Box, Size]:
        """As torchvision chooses it: ten attempts, then the largest centred box within the ratios."""
        size, (low, high) = _pair(self.size), self.ratio
        for _ in range(10):
            area = height * width * random.uniform(*self.scale)
            aspect = math.exp(random.uniform(math.log(low), math.log(high)))
            w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < w <= width and 0 < h <= height:
                return (random.below(height - h + 1), random.below(width - w + 1), h, w), size
        h, w = height, width
        if width / height < low:
            h = round(width / low)
        elif width / height > high:
            w = round(height * high)
        return ((height - h) // 2, (width - w) // 2, h, w), size


@dataclass(frozen=True)
class Resize(_Cropping):
    """The whole picture at another size: (height, width), or a number for the shorter side."""

    size: int | Size
    exact: bool = False

    def box(self, height: int, width: int, random: Random) -> tuple[Box, Size]:
        """All of the picture."""
        if isinstance(self.size, int):
            short, long = min(height, width), max(height, width)
            other = int(self.size * long / short)
            size = (self.size, other) if height <= width else (other, self.size)
        else:
            size = _pair(self.size)
        return (0, 0, height, width), size


@dataclass(frozen=True)
class CenterCrop(Transform):
    """The centre at its own size; a smaller picture is padded with 0."""

    size: int | Size

    def apply(self, image: torch.Tensor, random: Random) -> torch.Tensor:
        """Pad and cut."""
        (h, w), (height, width) = _pair(self.size), image.shape[-2:]
        if h > height or w > width:
            across, down = max(w - width, 0), max(h - height, 0)
            edges = (across // 2, (across + 1) // 2, down // 2, (down + 1) // 2)
            image = torch.nn.functional.pad(image, edges)
            height, width = image.shape[-2:]
        y, x = round((height - h) / 2.0), round((width - w) / 2.0)
        return image[..., y : y + h, x : x + w]


@dataclass(frozen=True)
class RandomHorizontalFlip(Transform):
    """Left and right exchanged, with probability ``p``."""

    p: float = 0.5

    def apply(self, image: torch.Tensor, random: Random) -> torch.Tensor:
        """Flip, or not."""
        return image.flip(-1) if random.uniform() < self.p else image


class Compose(Transform):
    """One after another; any callables of a tensor may follow ours."""

    def __init__(self, transforms: Sequence[Callable[[Any], Any]]) -> None:
        if not transforms or not isinstance(transforms[0], Transform):
            raise OptionError("Compose begins with a transform of shardstore.transforms; others may follow")
        self.transforms = list(transforms)

    def apply(self, image: torch.Tensor, random: Random) -> Any:
        """All in turn."""
        return self._rest(self.transforms, image, random)

    def decode(self, data: bytes, random: Random, checked: bool = False, max_pixels: int = MAX_PIXELS) -> Any:
        """Decode as the first one needs it, and go on."""
        first = self.transforms[0]
        assert isinstance(first, Transform)
        return self._rest(self.transforms[1:], first.decode(data, random, checked, max_pixels), random)

    def _rest(self, transforms: Sequence[Callable[[Any], Any]], image: Any, random: Random) -> Any:
        for transform in transforms:
            image = transform.apply(image, random) if isinstance(transform, Transform) else transform(image)
        return image

    def __repr__(self) -> str:
        return f"Compose({self.transforms})"


def _pair(size: int | Size) -> Size:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _tensor(image: Any) -> torch.Tensor:
    if isinstance(image, torch.Tensor):
        return image
    array = image if isinstance(image, np.ndarray) else images.from_pil(image)
    return torch.from_numpy(array).permute(2, 0, 1)


def _resized(image: torch.Tensor, size: Size) -> torch.Tensor:
    """Antialiased bilinear, as Pillow and torchvision do it."""
    if tuple(image.shape[-2:]) == size:
        return image
    float_first = image.dtype not in (torch.uint8, torch.float32)
    source = image.float() if float_first else image
    out = torch.nn.functional.interpolate(source[None], size, mode="bilinear", antialias=True)[0]
    return out.round().to(image.dtype) if float_first else out
