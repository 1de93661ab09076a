"""Optimizers and learning-rate schedules, as optax chains."""

from jaxllm.optim.build import layer_optimizer as layer_optimizer
from jaxllm.optim.build import optimizer as optimizer
from jaxllm.optim.config import OptimConfig as OptimConfig
from jaxllm.optim.matrix_params import decay_mask as decay_mask
from jaxllm.optim.optimizer_spec import DifferentiatedTree as DifferentiatedTree
from jaxllm.optim.optimizer_spec import OptimizerSpec as OptimizerSpec
from jaxllm.optim.optimizer_spec import StepHooks as StepHooks
from jaxllm.optim.optimizer_table import OPTIMIZERS as OPTIMIZERS
from jaxllm.optim.schedules import ScheduleConfig as ScheduleConfig
from jaxllm.optim.schedules import schedule as schedule
from jaxllm.optim.schedules import schedule_count as schedule_count
