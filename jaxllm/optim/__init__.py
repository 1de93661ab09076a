"""Optimizers and learning-rate schedules, as optax chains."""

from jaxllm.optim.build import decay_mask as decay_mask
from jaxllm.optim.build import optimizer as optimizer
from jaxllm.optim.config import OptimConfig as OptimConfig
from jaxllm.optim.schedules import ScheduleConfig as ScheduleConfig
from jaxllm.optim.schedules import schedule as schedule
