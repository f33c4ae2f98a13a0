#include "tile_plan.h"

#include <algorithm>

namespace wtconv::cpu {

Geometry make_geometry(int64_t batch, int64_t channels, int64_t height, int64_t width,
                       int64_t levels, int64_t kernel_size) {
  Geometry g{batch, channels, levels, kernel_size, {}, {}};
  for (int64_t level = 0; level <= levels; ++level) {
    g.height[level] = height;
    g.width[level] = width;
    height = (height + 1) / 2;
    width = (width + 1) / 2;
  }
  return g;
}

Padding forward_padding(int64_t kernel_size) {
  const int64_t before = (kernel_size - 1) / 2, after = kernel_size / 2;
  return {before, before, after, after};
}

Padding adjoint_padding(int64_t kernel_size) {
  const Padding pad = forward_padding(kernel_size);
  return {pad.bottom, pad.right, pad.top, pad.left};
}

int64_t choose_tile_rows(const Geometry& geometry, int64_t vector_bytes, int64_t blocks) {
  constexpr int64_t kCacheBytes = int64_t(4) << 20, kMinTiles = 16, kBuffers = 4;
  const int64_t height = geometry.height[0];
  if (geometry.levels >= 31) return height;
  const int64_t unit = int64_t(1) << geometry.levels;
  // A tile reads a halo of radius * 2^levels rows on both sides: at most as much again as it owns.
  const int64_t least = std::max<int64_t>(1, geometry.kernel_size / 2) * 2 * unit;
  int64_t rows = height;
  const auto too_large = [&](int64_t candidate) {
    const int64_t tiles = (height + candidate - 1) / candidate;
    return kBuffers * candidate * geometry.width[0] * vector_bytes > kCacheBytes ||
           tiles * blocks * geometry.batch < kMinTiles;
  };
  while (rows > least && too_large(rows)) {
    rows = std::max(least, (rows / 2 + unit - 1) / unit * unit);
  }
  return std::min(rows, height);
}

TilePlan plan_tile(const Geometry& geometry, const Padding& pad, int64_t row_lo, int64_t row_hi) {
  TilePlan plan{};
  plan.levels = geometry.levels;
  plan.kernel_size = geometry.kernel_size;
  plan.pad = pad;
  for (int64_t level = 0; level <= plan.levels; ++level) {
    LevelPlan& p = plan.level[level];
    p.height = geometry.height[level];
    p.width = geometry.width[level];
    p.own_lo = row_lo;
    p.own_hi = row_hi;
    row_lo /= 2;
    row_hi = (row_hi + 1) / 2;
  }
  for (int64_t level = plan.levels; level >= 0; --level) {
    LevelPlan& p = plan.level[level];
    p.need_lo = std::max<int64_t>(0, p.own_lo - pad.top);
    p.need_hi = std::min(p.height, p.own_hi + pad.bottom);
    if (level < plan.levels) {
      const LevelPlan& coarser = plan.level[level + 1];
      p.need_lo = std::min(p.need_lo, 2 * coarser.need_lo);
      p.need_hi = std::max(p.need_hi, std::min(p.height, 2 * coarser.need_hi));
    }
    // One row and column beyond an odd edge stand for the zero padding of the analysis.
    p.store_lo = std::min(p.need_lo, p.own_lo - pad.top);
    p.store_hi = std::max(p.need_hi + 1, p.own_hi + pad.bottom);
    p.pitch = pad.left + p.width + std::max<int64_t>(1, pad.right);
  }
  int64_t offset = 0;
  for (int64_t level = 0; level <= plan.levels; ++level) {
    LevelPlan& p = plan.level[level];
    p.offset = offset;
    p.band_stride = (p.store_hi - p.store_lo) * p.pitch;
    offset += (level ? 4 : 1) * p.band_stride;
  }
  plan.pyramid_vectors = offset;
  for (int64_t level = 1; level <= plan.levels; ++level) {
    const LevelPlan& finer = plan.level[level - 1];
    plan.reconstruction[level] = offset;
    offset += (finer.own_hi - finer.own_lo) * finer.width;
  }
  plan.row_buffer = offset;
  plan.total_vectors = offset + 4 * plan.level[1].width;
  return plan;
}

}  // namespace wtconv::cpu
