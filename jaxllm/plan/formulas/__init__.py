"""Cost model: step time, memory, collectives and roofline of a layout, by formula."""
