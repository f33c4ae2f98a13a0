// Boxes of a tensor, which one bulk copy moves between memory and shared memory. No CUDA header.
#pragma once

namespace wtconv::cuda {

// A tensor [B, C, H, W] and the size of its boxes, as the hardware reads them: a CUtensorMap.
struct alignas(128) BoxMap {
  unsigned char words[128];
};

// In shared memory rows of `cols` elements, dense. A box has every `row_step`-th row of a plane,
// `rows` of them, of `channels` neighbouring planes of each of `items` batch items, and zeros where
// it reaches past the tensor; a store leaves those out. `swizzled`: rows of 128 bytes whose pieces
// of 16 change places, piece i of row r being piece i ^ r % 8.
struct BoxShape {
  int cols, rows, row_step;
  bool swizzled;
  int channels = 1, items = 1;
};

}  // namespace wtconv::cuda
