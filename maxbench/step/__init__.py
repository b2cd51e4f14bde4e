"""When it is computed: data, microbatches, pipeline schedule, optimizer; one compiled step."""
