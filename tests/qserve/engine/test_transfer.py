"""Arrays on their way to the device and numbers on their way back."""

import numpy as np
import torch

from qserve.engine.step.transfer import HostCopy, PinnedCopies, all_to_device

CPU = torch.device("cpu")


def test_arrays_of_one_transfer_are_aligned():
    arrays = [np.arange(start, start + size) for start, size in ((3, 1), (9, 4), (20, 0), (5, 3))]
    found = all_to_device(arrays, CPU)
    assert [tensor.tolist() for tensor in found] == [array.tolist() for array in arrays]
    first = found[0].data_ptr()
    assert all((tensor.data_ptr() - first) % 16 == 0 for tensor in found if len(tensor))


def test_partial_copy_into_larger_buffer():
    copies, place = PinnedCopies(CPU), torch.full((5,), 7)
    copies.send_(np.array([1, 2, 3]), place)
    assert place.tolist() == [1, 2, 3, 7, 7]
    fetched = copies.fetch(place)
    place.zero_()
    assert fetched.part(1, 4).wait().tolist() == [2, 3, 7]
    assert fetched.wait().tolist() == [1, 2, 3, 7, 7]
    assert isinstance(fetched, HostCopy)
