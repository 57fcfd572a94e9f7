"""What a part needs of the machine; what is missing skips it by name."""

from cloudai_mbridge.gpu_check.kit import Kit, PartFailed, PartSkipped


def gpu(kit: Kit) -> None:
    """Need a GPU that torch can use; where there is nvidia-smi, its absence is a failure."""
    if kit.device.gpu is not None:
        return
    if kit.device.has_nvidia_smi:
        raise PartFailed(f"{kit.device.no_gpu}, although this machine has nvidia-smi")
    raise PartSkipped(kit.device.no_gpu)


def known_gpu(kit: Kit) -> None:
    """Need a GPU that the estimates know."""
    gpu(kit)
    if kit.device.gpu_type is None:
        raise PartSkipped(f"no estimates for {kit.device.gpu}")


def transformer_engine(kit: Kit) -> None:
    """Need Transformer Engine."""
    if kit.device.no_transformer_engine:
        raise PartSkipped(f"no Transformer Engine: {kit.device.no_transformer_engine}")
