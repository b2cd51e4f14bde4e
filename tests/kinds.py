"""Layers of toys."""

from maxbench.config.channels import Experts, Mlp
from maxbench.config.mixers import Attention
from maxbench.config.sublayers import Layer


def dense(mlp: int, **mixer) -> Layer:
    """Grouped-query attention and an MLP of this width."""
    return Layer(mixer=Attention(**mixer), channel=Mlp(mlp=mlp))


def routed(mlp: int, experts: int, **mixer) -> Layer:
    """Grouped-query attention and so many experts of this width."""
    return Layer(mixer=Attention(**mixer), channel=Experts(mlp=mlp, experts=experts))
