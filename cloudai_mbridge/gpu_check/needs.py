"""What a part needs of the machine; what is missing skips it by name."""

from cloudai_mbridge.gpu_check.kit import Kit, PartSkipped


def gpu(kit: Kit) -> None:
    """Need a GPU that torch can use."""
    if kit.device.gpu is None:
        raise PartSkipped("no GPU that torch can use")


def known_gpu(kit: Kit) -> None:
    """Need a GPU that the estimates know."""
    gpu(kit)
    if kit.device.gpu_type is None:
        raise PartSkipped(f"no estimates for {kit.device.gpu}")


def transformer_engine(kit: Kit) -> None:
    """Need Transformer Engine."""
    if kit.device.no_transformer_engine:
        raise PartSkipped(f"no Transformer Engine: {kit.device.no_transformer_engine}")
