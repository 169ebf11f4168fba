#include "cpu_optimizer_service/gradients/direction_store.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {

absl::StatusOr<std::unique_ptr<DirectionStore>> DirectionStore::Create(const JobSpec& spec,
                                                                       const Layout& layout,
                                                                       ArenaFactory& arenas) {
  std::unique_ptr<DirectionStore> store;
  const int64_t bytes = DirectionBytes(spec, layout);
  if (bytes == 0) return store;
  store.reset(new DirectionStore(layout));
  const auto create = [&](int64_t size, absl::string_view what) {
    return arenas.Create(size, absl::StrCat("job ", spec.name, " ", what),
                         ArenaFactory::Touch::kNow);
  };
  BALLAST_ASSIGN_OR_RETURN(store->arena_, create(bytes, "directions"));
  BALLAST_ASSIGN_OR_RETURN(store->scratch_, create(NewtonSchulzBytes(spec), "Newton-Schulz"));
  std::byte* place = store->arena_->data();
  for (const Chunk& chunk : layout.chunks()) {
    const bool has_one = RowOf(spec.groups[chunk.group].hyper_parameters.rule).rounds > 1;
    store->chunks_.push_back(has_one ? reinterpret_cast<uint16_t*>(place) : nullptr);
    if (has_one) place += AlignUp(chunk.elements * int64_t{sizeof(uint16_t)});
  }
  return store;
}

void DirectionStore::Gather(int parameter, int64_t begin, absl::Span<uint16_t> elements) const {
  const auto end = begin + static_cast<int64_t>(elements.size());
  layout_.VisitRange(parameter, begin, end, [&](const ChunkPiece& piece) {
    std::memcpy(elements.data() + (piece.parameter_offset - begin),
                chunks_[piece.chunk] + piece.chunk_offset, piece.elements * sizeof(uint16_t));
  });
}

void DirectionStore::Scatter(int parameter, int64_t begin, absl::Span<const uint16_t> elements) {
  const auto end = begin + static_cast<int64_t>(elements.size());
  layout_.VisitRange(parameter, begin, end, [&](const ChunkPiece& piece) {
    std::memcpy(chunks_[piece.chunk] + piece.chunk_offset,
                elements.data() + (piece.parameter_offset - begin),
                piece.elements * sizeof(uint16_t));
  });
}

absl::Span<float> DirectionStore::scratch() const {
  return absl::MakeSpan(reinterpret_cast<float*>(scratch_->data()),
                        scratch_->size_bytes() / sizeof(float));
}

}  // namespace ballast
