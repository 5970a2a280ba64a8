"""Between the bytes of a picture and an array; with ``opening.py`` the only user of Pillow and simplejpeg.

What a picture becomes is one rule: **RGB, uint8, shape (height, width, 3)**, the values of Pillow's ``convert("RGB")``;
but pictures whose values RGB would clip (16-bit and 32-bit integer grey, float) keep their own dtype with shape
(height, width, 1). Orientation tags are not applied and colour profiles are left alone, as ImageFolder does.

JPEGs are decoded by libjpeg-turbo through simplejpeg in strict mode (1.45 times Pillow's speed, identical pixels), all
else by Pillow. A JPEG that libjpeg calls corrupt is refused, although Pillow would fill the rest with grey.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from shardstore.errors import ImageError
from shardstore.pictures import early
from shardstore.pictures.opening import MAX_PIXELS, allowing, check_size, opened, reason

if TYPE_CHECKING:
    from PIL import Image as PilImage

Array = np.ndarray[Any, np.dtype[Any]]
Fit = Literal["crop", "pad", "stretch"]
FITS: tuple[Fit, ...] = get_args(Fit)

# What libjpeg says of entropy-coded data that is damaged or missing (jerror.h of libjpeg-turbo).
_CORRUPT = ("Corrupt JPEG data", "Premature end of JPEG file")
_JPEG_SPACES = ("YCbCr", "Gray", "RGB")  # inks (CMYK, YCCK) become RGB in Pillow's way, not in libjpeg-turbo's
_EXACT_MODES = {"I": "int32", "F": "float32", "I;16": "uint16", "I;16L": "uint16", "I;16B": "uint16", "I;16N": "uint16"}
_NO_PIXELS = {"BUFR", "GRIB", "HDF5", "MPEG", "EPS", "WMF", "EMF"}  # Pillow knows the names, other programs the pixels
_SIGNED = ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF", "JPEG2000", "AVIF", "PSD", "QOI")  # signatures of some length
# Pictures that are resized and encoded again. A restart marker a row of blocks, at 0.2 % of the bytes, lets a decoder
# begin at any of them; quality 90 is what common tools for smaller copies of ImageNet take.
_JPEG_OPTIONS: dict[str, Any] = {"quality": 90, "progressive": False, "restart_marker_rows": 1}
LOSSLESS = ("PNG", "TIFF")  # what other pictures become
_MAX_EXIF = 65533  # bytes of a JPEG's segment


@dataclass(frozen=True)
class Header:
    """What a picture says of itself before its pixels are decoded.

    Attributes:
        format: Pillow's name of the file format, in capitals (``JPEG``, ``PNG``).
        shape: height, width and channels of the decoded array.
        dtype: of the decoded array, as numpy spells it.
    """

    format: str
    shape: tuple[int, int, int]
    dtype: str


def probe(data: bytes, max_pixels: int = MAX_PIXELS) -> Header:
    """Read a picture's header.

    Raises:
        ImageError: ``data`` is not a picture that can be decoded, or has more than ``max_pixels`` pixels.
    """
    if is_jpeg(data):
        import simplejpeg

        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            check_size(height, width, max_pixels)
            return Header("JPEG", (height, width, 3), "uint8")
        except ValueError:
            pass  # Pillow reads more kinds, and says better what is wrong
    with opened(data, max_pixels) as image:
        dtype = _EXACT_MODES.get(image.mode, "uint8")
        return Header(str(image.format), (image.height, image.width, 3 if dtype == "uint8" else 1), dtype)


def decode(data: bytes, max_pixels: int = MAX_PIXELS) -> Array:
    """Decode a picture strictly: the array that the rule at the top of this module says.

    Raises:
        ImageError: ``data`` is damaged, cut, or not a picture; or has more than ``max_pixels`` pixels: its header is
            looked at before memory is taken.
    """
    if is_jpeg(data):
        import simplejpeg

        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
            if space in _JPEG_SPACES:
                check_size(height, width, max_pixels)
                return np.asarray(simplejpeg.decode_jpeg(data, "RGB", strict=True))
        except ValueError as error:
            if str(error).startswith(_CORRUPT):
                raise ImageError(str(error)) from None
    with opened(data, max_pixels) as image:
        try:
            with allowing(image.width * image.height):
                array = from_pil(image)
        except MemoryError:
            raise  # no fault of the picture
        except Exception as error:  # Pillow's plugins raise whatever they meet: OSError, SyntaxError, struct.error, …
            raise ImageError(reason(error)) from error
    check_size(array.shape[0], array.shape[1], max_pixels)  # icons hold pictures with headers of their own
    return array


def decode_part(data: bytes, rows: int | None, scale: int = 1, max_pixels: int = MAX_PIXELS) -> Array:
    """Decode a picture at 1/scale of its size; at least its first ``rows`` rows, which asks for bytes that are known to
    be a good picture's: what is wrong with them then goes unnoticed. None for all rows, strictly.

    A JPEG's decoder stops soon after these rows. Its scaled inverse DCT knows the scales 1, 2, 4 and 8; other formats
    are decoded whole and averaged.

    Returns:
        Shape (about height / scale, ceil(width / scale), channels).
    """
    if is_jpeg(data):
        import simplejpeg

        try:
            height, width, space, _ = simplejpeg.decode_jpeg_header(data)
            if space in _JPEG_SPACES:
                check_size(height, width, max_pixels)
                part = data if rows is None else early.lowered(data, min(rows + 2 * scale, height))
                height = height if part is data else simplejpeg.decode_jpeg_header(part)[0]
                least = {"min_height": -(-height // scale), "min_width": -(-width // scale)} if scale > 1 else {}
                return np.asarray(simplejpeg.decode_jpeg(part, "RGB", strict=part is data, **least))
        except ValueError:
            pass  # what is wrong, or which other way leads to the pixels, decode() knows
    array = decode(data, max_pixels)
    if scale == 1:
        return array
    return resize(array, (-(-array.shape[0] // scale), -(-array.shape[1] // scale)), "stretch")


def from_pil(image: PilImage.Image) -> Array:
    """A Pillow image as the array that the rule at the top of this module says."""
    dtype = _EXACT_MODES.get(image.mode)
    if dtype is None:
        return np.array(image.convert("RGB"))  # a copy: Pillow's own memory is read-only, and torch wants to write
    return np.array(image).astype(dtype, copy=False)[:, :, None]


def to_pil(array: Array) -> PilImage.Image:
    """The Pillow image of such an array: mode RGB, or the grey mode of its dtype."""
    from PIL import Image

    try:
        return Image.fromarray(array[:, :, 0] if array.shape[2] == 1 else array)
    except (TypeError, ValueError) as error:  # of a field of one's own
        raise ImageError(f"values of {array.dtype}{array.shape} are no picture that Pillow knows") from error


def encode_png(array: Array, **metadata: Any) -> bytes:
    """A PNG (TIFF for what PNG cannot hold) with exactly these values, and Pillow's options for metadata."""
    out = io.BytesIO()
    to_pil(array).save(out, lossless_format(array.dtype), **metadata)
    return out.getvalue()


def lossless_format(dtype: np.dtype[Any]) -> str:
    """The format that holds such pixels exactly: PNG knows at most 16 bits."""
    png, tiff = LOSSLESS
    return png if dtype.kind == "u" else tiff


def shrink(data: bytes, short: int, max_pixels: int = MAX_PIXELS) -> bytes | None:
    """Bring an encoded picture down to ``short`` pixels on its shorter side (the longer as torchvision's ``Resize``
    rounds it) and encode it again: a JPEG as JPEG, others without loss. EXIF (where it fits) and colour profile stay.

    Returns:
        None where the picture is small enough: only its header was looked at then.

    Raises:
        ImageError: as :func:`decode`.
    """
    if min(probe(data, max_pixels).shape[:2]) <= short:
        return None
    array, kept, grey = decode(data, max_pixels), {}, False
    try:
        with opened(data, max_pixels) as image:
            kept, grey = image.info, image.mode == "L"
    except ImageError:
        pass  # its pixels are good: Pillow will not open JPEGs beyond some size, or with odd metadata
    array = array[:, :, :1] if grey else array  # all three are the same
    height, width = array.shape[:2]
    shorter = min(height, width)
    array = resize(array, (int(short * height / shorter), int(short * width / shorter)), "stretch")
    metadata = _metadata(kept, array.shape[2])
    if not is_jpeg(data):
        return encode_png(array, **metadata)
    out, colour = io.BytesIO(), {} if array.shape[2] == 1 else {"subsampling": "4:2:0"}
    to_pil(array).save(out, "JPEG", **_JPEG_OPTIONS, **colour, **metadata)
    return out.getvalue()


def _metadata(info: Mapping[Any, Any], channels: int) -> dict[str, Any]:
    """What a new file of a picture keeps of the old one's metadata, as options for Pillow."""
    profile, exif = info.get("icc_profile") or b"", info.get("exif") or b""
    metadata = {}
    if profile[16:20] == (b"RGB " if channels == 3 else b"GRAY"):  # not that of inks, which are RGB now
        metadata["icc_profile"] = profile
    if 0 < len(exif) <= _MAX_EXIF:
        metadata["exif"] = exif
    return metadata


def resize(array: Array, size: tuple[int, int], fit: Fit) -> Array:
    """Bring a picture to ``size`` (height, width), by Pillow's antialiased bilinear filter.

    Args:
        array: shape (h, w, channels).
        size: the target height and width.
        fit: ``crop`` scales the picture to cover the target and cuts the centre; ``pad`` scales it to lie inside and
            fills with 0; ``stretch`` ignores the aspect ratio.
    """
    from PIL import Image

    height, width = array.shape[:2]
    if (height, width) == size:
        return array
    scales = (size[0] / height, size[1] / width)
    if fit == "stretch":
        scaled = size
    else:
        scale = max(scales) if fit == "crop" else min(scales)
        bound = max if fit == "crop" else min
        scaled = (bound(round(height * scale), size[0]), bound(round(width * scale), size[1]))
        scaled = (max(scaled[0], 1), max(scaled[1], 1))
    image = to_pil(array).resize((scaled[1], scaled[0]), Image.Resampling.BILINEAR)
    result = np.asarray(image).reshape(*scaled, array.shape[2])
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    if fit == "crop":
        return result[top : top + size[0], left : left + size[1]]
    out = np.zeros((*size, array.shape[2]), array.dtype)
    out[-top : -top + scaled[0], -left : -left + scaled[1]] = result
    return out


def is_jpeg(data: bytes) -> bool:
    """Whether the bytes begin as a JPEG does (SOI marker and the next marker's first byte, ITU T.81 B.1.1)."""
    return data[:3] == b"\xff\xd8\xff"


def is_named_so(name: str, format: str) -> bool:
    """Whether a file's ending is one of this format."""
    from PIL import Image

    return Image.registered_extensions().get(os.path.splitext(name)[1].lower()) == format


def pillow_version() -> str:
    """What resized pictures depend on, beside their source."""
    from PIL import __version__

    return __version__


@functools.cache
def suffixes() -> frozenset[str]:
    """All file name endings (lower case, with the dot) of pictures that Pillow can open here."""
    from PIL import Image

    Image.init()
    known = Image.registered_extensions().items()
    return frozenset(s.lower() for s, f in known if f in Image.OPEN and f not in _NO_PIXELS)


def looks_like_picture(head: bytes) -> bool:
    """Whether the first bytes (16 or more) of a file are the signature of a picture format."""
    from PIL import Image

    Image.init()
    accepts = (Image.OPEN[name][1] for name in _SIGNED if name in Image.OPEN)
    return any(accept is not None and accept(head) is True for accept in accepts)
