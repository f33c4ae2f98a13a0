// Shared memory of the tensor-core kernels for channels_last planes, in bytes. No CUDA header.
#pragma once

#include "mma_planes_layout.h"

namespace wtconv::cuda {

// Eight channels of a plane, 16 bytes of a pixel: four at a time, each with a team of threads.
template <int K>
struct MmaGroupMemory {
  static constexpr int kGroup = kMmaGroup, kTeams = 4, kRounds = kGroup / kTeams;
  static_assert(kTeams == 4, "what a thread moves of a pixel is a vector of four");
  using W = MmaPlanesWindow<K, 1, 8>;
  using Deep = DeepMemory<K>;

  // Of a team, from its first byte on: the window, which outputs take the place of; LL1; the levels
  // past 2.
  static constexpr int kLowpass = W::size(0) * 2;
  static constexpr int kRaw = kLowpass + W::size(1) * 2;
  static constexpr int kFiltered = kRaw + Deep::kRaw;
  static constexpr int kTeam = kFiltered + Deep::kFiltered;
  static_assert(sizeof(ChannelTaps<K, 2>) <= kLowpass, "at the start, taps lie in the window");

  // Of a channel: fragments of the levels, taps of those past 2, factors.
  static constexpr int fragments(int level) {
    return level * tap_products(0) * W::kRows * W::kGroups * 32 * 4;
  }
  static constexpr int kDeepTaps = fragments(2);
  static constexpr int kFactors = kDeepTaps + Deep::kTaps;
  static constexpr int kChannel = kFactors + 16;

  static constexpr int kChannels = kTeams * kTeam;
  static constexpr int kPixels = kChannels + kGroup * kChannel;
  static constexpr int bytes(int height, int width) {
    return kPixels + height * width * kGroup * 2;
  }
};

// The same of the weight gradients: of a team the windows of both operands and LL of both. A thread
// keeps the sums of both its channels, so that a warp takes rows of one parity of each.
template <int K, int L>
struct MmaGroupGradMemory : MmaGradShare<K, L, 1, 1, false> {
  using Share = typename MmaGroupGradMemory::MmaGradShare;
  static constexpr int kGroup = kMmaGroup, kTeams = 4, kRounds = kGroup / kTeams;
  static constexpr int kLow = Share::kWindow;
  static constexpr int kTeam = kLow + Share::kLowInput + Share::kLowGrad;
  static_assert(Share::kScratch <= kTeam, "fits the windows");

  static constexpr int kFormInput = kTeams * kTeam;
  static constexpr int kFormGrad = kFormInput + lowpass_bytes<typename Share::WX, L - 1>();
  static constexpr int kPixels = kFormGrad + lowpass_bytes<typename Share::WG, L - 1>();
  static constexpr int bytes(int height, int width) {
    return kPixels + 2 * height * width * kGroup * 2;
  }
};

}  // namespace wtconv::cuda
