// Registers the ops of csrc/cuda for tensors of the CPU.
#pragma once

#include <torch/csrc/stable/library.h>

#undef STABLE_TORCH_LIBRARY_IMPL
#define STABLE_TORCH_LIBRARY_IMPL(ns, k, m) _STABLE_TORCH_LIBRARY_IMPL(ns, CPU, m, C10_UID)
