"""Command line: the ``jaxllm`` command and its subcommands."""

from jaxllm.cli.command_table import COMMANDS as COMMANDS
from jaxllm.cli.errors import UsageError as UsageError
from jaxllm.cli.errors import guarded as guarded
from jaxllm.cli.main import main as main
from jaxllm.cli.recipe_arguments import configure as configure
from jaxllm.cli.recipe_arguments import find_recipe as find_recipe
from jaxllm.cli.recipe_arguments import recipes as recipes
from jaxllm.cli.recipe_arguments import run_recipe as run_recipe
