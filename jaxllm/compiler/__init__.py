"""Compiler tools: ahead-of-time compilation for any topology, and analysis of compiled programs.

``jaxllm.compiler.aot`` compiles and reports. The other modules read the text of optimised HLO: collectives, memory
traffic, live ranges, schedule and timeline.
"""
