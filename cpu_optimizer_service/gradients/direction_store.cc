#include "cpu_optimizer_service/gradients/direction_store.h"

#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/rule.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {

absl::StatusOr<std::unique_ptr<DirectionStore>> DirectionStore::Create(const JobSpec& spec,
                                                                       const Layout& layout,
                                                                       ArenaFactory& arenas,
                                                                       ArenaFactory& scratch) {
  std::unique_ptr<DirectionStore> store;
  const int64_t bytes = DirectionBytes(spec, layout);
  if (bytes == 0) return store;
  store.reset(new DirectionStore(layout));
  const std::string label = absl::StrCat("job ", spec.name);
  BALLAST_ASSIGN_OR_RETURN(store->arena_, arenas.Create(bytes, absl::StrCat(label, " directions"),
                                                        ArenaFactory::Touch::kNow));
  BALLAST_ASSIGN_OR_RETURN(store->scratch_, scratch.Create(NewtonSchulzBytes(spec),
                                                           absl::StrCat(label, " Newton-Schulz"),
                                                           ArenaFactory::Touch::kNow));
  std::byte* place = store->arena_->data();
  const auto take = [&place](const Chunk& chunk) {
    auto* const taken = reinterpret_cast<uint16_t*>(place);
    place += AlignUp(chunk.elements * int64_t{sizeof(uint16_t)});
    return taken;
  };
  for (const Chunk& chunk : layout.chunks()) {
    const bool has_one = HasTwoRounds(spec.groups[chunk.group].hyper_parameters.rule);
    store->directions_.push_back(has_one ? take(chunk) : nullptr);
    store->orthogonal_.push_back(has_one ? take(chunk) : nullptr);
  }
  return store;
}

void DirectionStore::Gather(int parameter, int64_t begin, absl::Span<uint16_t> elements) const {
  const auto end = begin + static_cast<int64_t>(elements.size());
  layout_.VisitRange(parameter, begin, end, [&](const ChunkPiece& piece) {
    std::memcpy(elements.data() + (piece.parameter_offset - begin),
                directions_[piece.chunk] + piece.chunk_offset, piece.elements * sizeof(uint16_t));
  });
}

void DirectionStore::Scatter(int parameter, int64_t begin, absl::Span<const uint16_t> elements) {
  const auto end = begin + static_cast<int64_t>(elements.size());
  layout_.VisitRange(parameter, begin, end, [&](const ChunkPiece& piece) {
    std::memcpy(orthogonal_[piece.chunk] + piece.chunk_offset,
                elements.data() + (piece.parameter_offset - begin),
                piece.elements * sizeof(uint16_t));
  });
}

absl::Span<float> DirectionStore::scratch() const {
  return absl::MakeSpan(reinterpret_cast<float*>(scratch_->data()),
                        scratch_->size_bytes() / sizeof(float));
}

}  // namespace ballast
