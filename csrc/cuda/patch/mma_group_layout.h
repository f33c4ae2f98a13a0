// Shared memory of the tensor-core kernels for channels_last planes, in bytes. No CUDA header.
#pragma once

#include "mma_planes_layout.h"

namespace wtconv::cuda {

// Eight channels of kItems batch items, in windows of G channels, side by side, of G of the items,
// one below the other. A team takes every fourth window, of planes of one tile two.
template <int K, int G>
struct MmaGroupMemory {
  static constexpr int kGroup = kMmaGroup, kTeams = 4, kThreads = kTeams * kPatchThreads;
  static constexpr int kAcross = G;            // planes of a window on each side
  static constexpr int kOfItems = kGroup / G;  // windows of the same items
  static constexpr int kWindows = kOfItems < kTeams ? kTeams : kOfItems;
  static constexpr int kItems = kWindows / kOfItems * G;
  using W = MmaPlanesWindow<K, G, 8>;
  using Deep = DeepMemory<K, G>;

  // Windows, which outputs take the place of.
  static constexpr int kWindow = round_up(W::size(0) * 2, 16);
  // Of a team: LL1; the levels past 2 before their filter and after it.
  static constexpr int kOwn = kWindows * kWindow;
  static constexpr int kRaw = round_up(W::size(1) * 2, 16);
  static constexpr int kFiltered = kRaw + Deep::kRaw;
  static constexpr int kTeam = kFiltered + Deep::kFiltered;
  static_assert(kGroup / kTeams * int(sizeof(ChannelTaps<K, 2>)) <= kTeam - kRaw,
                "while their tables are formed, taps lie where levels past 2 do later");

  // Of a channel: tables of taps of the levels, taps of those past 2, factors.
  static constexpr int table(int level) { return level * tap_bytes<W>(0); }
  static constexpr int kDeepTaps = table(2);
  static constexpr int kFactors = kDeepTaps + Deep::kTaps;
  static constexpr int kChannel = kFactors + 16;

  static constexpr int kChannels = kOwn + kTeams * kTeam;
  // Pairs of columns of all planes, at most; where each lies in the windows.
  static constexpr int kPairs = kItems * W::plane(0) * W::plane(0) / 2;
  static constexpr int kPlaces = kChannels + kGroup * kChannel;
  static_assert(kPairs % kThreads == 0 && kOwn / 2 <= 1 << 16, "places are half words");
  static_assert(kPairs * (W::plane(0) / 2) <= 1 << 16, "GroupBands::row_of() is exact");
  static constexpr int kBarrier = kPlaces + kPairs * 2;
  static constexpr int kPixels = round_up(kBarrier + 8, 128);  // where a box may begin
  // A pair may begin with the last pixel.
  static constexpr int bytes(int height, int width) {
    return kPixels + (kItems * height * width + 1) * kGroup * 2;
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
  static constexpr int kBarrier = kFormGrad + lowpass_bytes<typename Share::WG, L - 1>();
  static constexpr int kPixels = round_up(kBarrier + 8, 128);
  static constexpr int pixel_bytes(int height, int width) {  // of an operand
    return round_up(height * width * kGroup * 2, 128);
  }
  static constexpr int bytes(int height, int width) {
    return kPixels + 2 * pixel_bytes(height, width);
  }
};

}  // namespace wtconv::cuda
