"""torchvision's ResNet-18 and ResNet-34 as extractors, with a small stem for small images."""

from torch import Tensor, nn

from edge_fl.inputs import InputSpec

SMALL = 64  # pixels per side; below, the 7x7 stem and the max-pool lose too much detail


class ResNet(nn.Module):
    """torchvision's network without its classifier; features [N, 512]."""

    def __init__(self, network: nn.Module, input: InputSpec) -> None:
        super().__init__()
        self.network = network
        self.feature_dim = int(network.fc.in_features)  # type: ignore[union-attr, arg-type]
        network.fc = nn.Identity()
        if min(input.height, input.width) < SMALL:
            network.conv1 = nn.Conv2d(input.channels, 64, 3, stride=1, padding=1, bias=False)
            network.maxpool = nn.Identity()
        elif input.channels != 3:
            network.conv1 = nn.Conv2d(input.channels, 64, 7, stride=2, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)  # type: ignore[no-any-return]


def resnet18(input: InputSpec) -> nn.Module:
    """ResNet-18, 11 M parameters; with ImageNet weights it is `torchvision:resnet18`."""
    import torchvision  # takes seconds

    return ResNet(torchvision.models.resnet18(weights=None), input)


def resnet34(input: InputSpec) -> nn.Module:
    """ResNet-34, 21 M parameters; with ImageNet weights it is `torchvision:resnet34`."""
    import torchvision  # takes seconds

    return ResNet(torchvision.models.resnet34(weights=None), input)
