"""Runs schedules on ``torch.distributed``: the operators that compute while their messages travel."""
