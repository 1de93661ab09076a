"""Inference with weights that are not all on the device: they come from the host or from files, layer by layer."""

from jaxllm.infer.streaming.layer_store import LayerStore as LayerStore
from jaxllm.infer.streaming.offload_budget import OffloadBudget as OffloadBudget
from jaxllm.infer.streaming.open_streamed import open_streamed as open_streamed
from jaxllm.infer.streaming.streamed_weights import StreamedWeights as StreamedWeights
from jaxllm.infer.streaming.streamed_weights import WeightPlacement as WeightPlacement
from jaxllm.infer.streaming.weight_file import WeightsUnavailableError as WeightsUnavailableError
