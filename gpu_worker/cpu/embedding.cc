#include "gpu_worker/cpu/embedding.h"

#include <algorithm>
#include <cstdint>

#include "gpu_worker/cpu/parallel.h"

namespace ballast::worker::cpu {
template <typename T>
void EmbeddingForward(const EmbeddingShape& shape, const int32_t* inputs, const T* tokens,
                      const T* positions, T* out) {
  const int width = shape.width;
  ForEachTile(shape.sequences * shape.context, kTileRows, [&](int begin, int end) {
    for (int row = begin; row < end; ++row) {
      const T* token = tokens + static_cast<int64_t>(inputs[row]) * width;
      const T* position = positions + static_cast<int64_t>(row % shape.context) * width;
      T* x = out + static_cast<int64_t>(row) * width;
      for (int i = 0; i < width; ++i) x[i] = token[i] + position[i];
    }
  });
}

template <typename T>
void EmbeddingBackward(const EmbeddingShape& shape, const int32_t* inputs, const T* d_out,
                       T* d_tokens, T* d_positions) {
  const int width = shape.width;
  // By columns: two rows may have the same token, two columns never meet.
  ForEachTile(width, kTileColumns, [&](int begin, int end) {
    // Only positions are cleared: the tokens' gradient has the head's part already.
    for (int t = 0; t < shape.context; ++t) {
      std::fill(d_positions + static_cast<int64_t>(t) * width + begin,
                d_positions + static_cast<int64_t>(t) * width + end, T{0});
    }
    // Each tile goes through all rows in order, so an element is summed in one order whatever the
    // number of threads.
    for (int row = 0; row < shape.sequences * shape.context; ++row) {
      const T* d_x = d_out + static_cast<int64_t>(row) * width;
      T* d_token = d_tokens + static_cast<int64_t>(inputs[row]) * width;
      T* d_position = d_positions + static_cast<int64_t>(row % shape.context) * width;
      for (int i = begin; i < end; ++i) {
        d_token[i] += d_x[i];
        d_position[i] += d_x[i];
      }
    }
  });
}

template void EmbeddingForward(const EmbeddingShape&, const int32_t*, const float*, const float*,
                               float*);
template void EmbeddingForward(const EmbeddingShape&, const int32_t*, const double*, const double*,
                               double*);
template void EmbeddingBackward(const EmbeddingShape&, const int32_t*, const float*, float*,
                                float*);
template void EmbeddingBackward(const EmbeddingShape&, const int32_t*, const double*, double*,
                                double*);

}  // namespace ballast::worker::cpu
