"""Other libraries' readers and writers of GPTQ and AWQ files, in a process of their own: gptqmodel and autoawq on CPUs.

    python packing_peer.py open MODEL OUT.npz
    python packing_peer.py pack MATRIX.npz OUT.npz

``open``: transformers opens the model, which has gptqmodel multiply; logits of the token IDs 7 i mod 64, and the
dequantised ``up_proj`` of the first layer. ``pack``: a matrix of given codes is packed by both libraries, and
dequantised.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np

LENGTH = 24


def opened(model: str) -> dict[str, np.ndarray]:
    """Logits [S, V], and a matrix [O, I]."""
    import torch
    import transformers

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    with torch.no_grad():
        logits = loaded(torch.arange(LENGTH)[None] * 7 % 64).logits[0].float().numpy()
        matrix = loaded.model.layers[0].mlp.up_proj.dequantize_weight()
    return {"logits": logits, "up": matrix.numpy().T}


def packed(given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Tensors of both layouts for codes [O, I], scales [O, G] and zero points [O, G], and the values they stand for."""
    import torch
    from awq.modules.linear import WQLinear_GEMM  # pyright: ignore[reportMissingImports]
    from awq.utils.packing_utils import dequantize_gemm  # pyright: ignore[reportMissingImports]
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear  # pyright: ignore[reportMissingImports]

    codes, scale, zero = (torch.from_numpy(given[name]) for name in ("codes", "scale", "zero"))
    outputs, inputs = codes.shape
    group = inputs // scale.shape[1]
    places = torch.arange(inputs) // group
    linear = torch.nn.Linear(inputs, outputs, bias=False)
    linear.weight.data = (codes.float() - zero.float()[:, places]) * scale.float()[:, places]
    awq = WQLinear_GEMM.from_linear(linear, 4, group, scales=scale.float().T, zeros=zero.float().T)
    gptq = TorchLinear(4, group, sym=False, desc_act=False, in_features=inputs, out_features=outputs)
    gptq.pack_original(linear, scale.float(), zero.float(), places.int())
    gptq.post_init()
    own = {"awq": awq, "gptq": gptq}
    out = {
        f"{name}.{part}": getattr(layer, part).numpy()
        for name, layer in own.items()
        for part in ("qweight", "qzeros", "scales")
    }
    out["gptq.g_idx"] = gptq.g_idx.numpy()
    out["gptq.dense"] = gptq.dequantize_weight().numpy().T
    out["awq.dense"] = dequantize_gemm(awq.qweight, awq.qzeros, awq.scales, 4, group).numpy().T
    return out


def main() -> int:
    """Does as the command line says."""
    warnings.filterwarnings("ignore")
    what, given, out = sys.argv[1:]
    np.savez(out, **(opened(given) if what == "open" else packed(dict(np.load(given)))))  # pyright: ignore[reportArgumentType]
    return 0


if __name__ == "__main__":
    sys.exit(main())
