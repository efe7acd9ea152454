"""The color statistics of ImageNet, in 0..255 units, and the weights of a gray value."""

# Mean and standard deviation of ImageNet's training images per RGB channel.
# Source: (0.485, 0.456, 0.406) and (0.229, 0.224, 0.225) of torchvision's examples, times 255.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)

# How much red, green and blue count in a gray value. Source: ITU-R BT.601, as JPEG and Pillow.
LUMA = (0.299, 0.587, 0.114)
