"""The machine and the process: installed versions, code revision, host name, cache folder, GPUs."""
