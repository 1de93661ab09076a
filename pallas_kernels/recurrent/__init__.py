"""Head-wise recurrent networks: LSTM, GRU and sLSTM with one recurrent matrix per head and gate (FlashRNN)."""

from pallas_kernels.recurrent.api import recurrent as recurrent
from pallas_kernels.recurrent.cells import CELLS as CELLS
from pallas_kernels.recurrent.cells import Cell as Cell
