"""Constants of the cost model, fitted to measurements on a device or to finished runs."""
