"""Diagnosis of a machine: installed versions, the NVIDIA driver and a trial of each device."""
