"""Decoding untrusted images into what an image processor takes."""

from io import BytesIO

from PIL import Image, ImageOps

from triptych.domain.media import MediaInfo, Modality
from triptych.errors import InvalidMedia

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""What Pillow may decode, by its own names; each image only as the format that was sniffed."""


def decode_image(media: bytes, info: MediaInfo) -> Image.Image:
    """The first frame, upright (EXIF orientation applied), in the mode in which it is stored.

    ``info`` was read from the header and is what all bounds were checked against, so an image that opens with another
    size is refused before its pixels are decoded. Raises InvalidMedia; its text never quotes the decoder.
    """
    name = info.format.upper()
    if info.modality is not Modality.IMAGE or name not in FORMATS:
        raise InvalidMedia(f"{info.modality.value} of format {info.format!r} is not supported")
    try:
        image: Image.Image = Image.open(BytesIO(media), formats=(name,))
        size = image.size
        if size in ((info.width, info.height), (info.height, info.width)):
            image.load()
            image = ImageOps.exif_transpose(image)
            size = image.size
    except Exception as error:  # Pillow's decoders raise whatever their parsing runs into
        raise InvalidMedia(f"the {info.format} image cannot be decoded") from error
    if size != (info.width, info.height):
        raise InvalidMedia(f"the image is {size[0]}x{size[1]}, its header says {info.width}x{info.height}")
    return image
