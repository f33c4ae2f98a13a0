// Quotients and multiples rounded up, for sizes of at least 0. No Torch and no CUDA header.
#pragma once

namespace wtconv::cuda {

constexpr int ceil_div(int value, int unit) { return (value + unit - 1) / unit; }
constexpr int round_up(int value, int unit) { return ceil_div(value, unit) * unit; }

}  // namespace wtconv::cuda
