#include "cpu_optimizer_service/gradients/gradient_store.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/kernels/kernels.h"

namespace ballast {
namespace {

// What a chunk without any contribution is read as.
alignas(64) const float kZeros[kMaxChunkElements] = {};

void Gather(absl::Span<const absl::Span<const std::byte>> pieces, std::byte* out) {
  for (const auto& piece : pieces) {
    if (!piece.empty()) std::memcpy(out, piece.data(), piece.size());
    out += piece.size();
  }
}

// The payload in one aligned piece: where it lies, or gathered into a buffer of this thread that
// stays in its cache.
const std::byte* Contiguous(absl::Span<const absl::Span<const std::byte>> pieces, DType dtype) {
  if (pieces.size() == 1 && reinterpret_cast<uintptr_t>(pieces[0].data()) % SizeBytes(dtype) == 0) {
    return pieces[0].data();
  }
  thread_local std::unique_ptr<std::byte[]> staging(
      new std::byte[kMaxChunkElements * SizeBytes(DType::kFloat32)]);
  Gather(pieces, staging.get());
  return staging.get();
}

}  // namespace

int64_t GradientStore::GradientBytes(const JobSpec& spec, const Layout& layout) {
  int64_t bytes = 0;
  for (const Chunk& chunk : layout.chunks()) {
    bytes += AlignUp(chunk.elements * SizeBytes(spec.groups[chunk.group].wire_dtype));
  }
  return bytes;
}

int64_t GradientStore::AccumulatorBytes(const JobSpec& spec, const Layout& layout) {
  if (spec.max_micro_steps == 1) return 0;
  return layout.total_flat_elements() * static_cast<int64_t>(sizeof(float));
}

GradientStore::GradientStore(const JobSpec& spec, const Layout& layout)
    : layout_(layout), chunks_(layout.chunks().size()), sums_(layout) {
  for (const GroupSpec& group : spec.groups) wire_dtypes_.push_back(group.wire_dtype);
}

absl::StatusOr<std::unique_ptr<GradientStore>> GradientStore::Create(const JobSpec& spec,
                                                                     const Layout& layout,
                                                                     ArenaFactory& arenas) {
  std::unique_ptr<GradientStore> store(new GradientStore(spec, layout));
  const std::string label = absl::StrCat("job ", spec.name);
  Places& places = *store->places_;
  BALLAST_ASSIGN_OR_RETURN(
      places.arena, arenas.Create(GradientBytes(spec, layout), absl::StrCat(label, " gradients"),
                                  ArenaFactory::Touch::kNow));
  places.lent = std::make_unique<std::atomic<bool>[]>(store->chunks_.size());
  std::byte* wire = places.arena->data();
  for (size_t i = 0; i < store->chunks_.size(); ++i) {
    store->chunks_[i].wire = wire;
    wire += AlignUp(store->PlaceBytes(static_cast<int>(i)));
  }
  if (const int64_t bytes = AccumulatorBytes(spec, layout); bytes > 0) {
    BALLAST_ASSIGN_OR_RETURN(
        store->sum_arena_,
        arenas.Create(bytes, absl::StrCat(label, " accumulators"), ArenaFactory::Touch::kNow));
    auto* sum = reinterpret_cast<float*>(store->sum_arena_->data());
    for (size_t i = 0; i < store->chunks_.size(); ++i) {
      store->chunks_[i].sum = sum;
      sum += layout.chunks()[i].elements;
    }
  }
  return store;
}

void GradientStore::Add(int index, absl::Span<const absl::Span<const std::byte>> payload) {
  ChunkGradient& chunk = chunks_[index];
  const Chunk& place = layout_.chunks()[index];
  const DType dtype = wire_dtypes_[place.group];
  switch (chunk.form) {
    case Form::kNone:
    case Form::kZero: {
      std::byte* const to = PlaceForPayload(index);
      Gather(payload, to);
      chunk.first = to;
      chunk.form = Form::kWire;
      return;
    }
    case Form::kWire:
      Check(chunk.sum != nullptr, "a chunk that is summed has an accumulator");
      SumGradients(chunk.sum, chunk.first, Contiguous(payload, dtype), dtype, place.elements);
      chunk.form = Form::kSum;
      accumulators_in_use_.fetch_add(1);
      return;
    case Form::kSum:
      AddGradient(chunk.sum, Contiguous(payload, dtype), dtype, place.elements);
      return;
  }
}

int64_t GradientStore::PlaceBytes(int index) const {
  const Chunk& chunk = layout_.chunks()[index];
  return chunk.elements * SizeBytes(wire_dtypes_[chunk.group]);
}

std::byte* GradientStore::PlaceForPayload(int index) {
  ChunkGradient& chunk = chunks_[index];
  if (!places_->lent[index].load(std::memory_order_acquire)) {
    chunk.elsewhere = nullptr;
    return chunk.wire;
  }
  // The rank has not taken its last weights, which a worker does before it goes on; or another
  // process has taken the rank, and what the older one left unread has not been dropped yet. So
  // this is rare, and for a few chunks.
  if (chunk.elsewhere == nullptr) chunk.elsewhere.reset(new std::byte[PlaceBytes(index)]);
  return chunk.elsewhere.get();
}

WeightBuffer GradientStore::LendPlace(int index, int64_t size_bytes) {
  const ChunkGradient& chunk = chunks_[index];
  const bool read_there = chunk.form == Form::kWire && chunk.first == chunk.wire;
  const int64_t place_bytes = PlaceBytes(index);
  if (read_there ? size_bytes != place_bytes : size_bytes > place_bytes) return {};
  if (places_->lent[index].exchange(true, std::memory_order_acquire)) return {};
  std::shared_ptr<const void> loan(chunk.wire, [places = places_, index](const void*) {
    places->lent[index].store(false, std::memory_order_release);
  });
  return WeightBuffer::Lent(std::move(loan), {chunk.wire, static_cast<size_t>(size_bytes)});
}

void GradientStore::Borrow(int index, const std::byte* payload) {
  ChunkGradient& chunk = chunks_[index];
  Check(chunk.form == Form::kNone, "only a chunk without a gradient borrows one");
  chunk.first = payload;
  chunk.form = Form::kWire;
}

void GradientStore::AddZeros(int index) {
  ChunkGradient& chunk = chunks_[index];
  if (chunk.form == Form::kNone) chunk.form = Form::kZero;
}

void GradientStore::Clear(int index) {
  ChunkGradient& chunk = chunks_[index];
  if (chunk.form == Form::kSum) accumulators_in_use_.fetch_sub(1);
  chunk.form = Form::kNone;
  chunk.first = nullptr;
}

GradientView GradientStore::view(int index) const {
  const ChunkGradient& chunk = chunks_[index];
  switch (chunk.form) {
    case Form::kWire:
      return {chunk.first, wire_dtypes_[layout_.chunks()[index].group]};
    case Form::kSum:
      return {chunk.sum, DType::kFloat32};
    case Form::kNone:
    case Form::kZero:
      break;
  }
  return {kZeros, DType::kFloat32};
}

void GradientStore::ComputeSums(int index) {
  const Form form = chunks_[index].form;
  if (form == Form::kZero || form == Form::kNone) return sums_.ZeroChunk(index);
  return sums_.SumChunk(index, view(index));
}

std::vector<double> GradientStore::CombineSums(SquareSums::ForEach for_each) {
  return sums_.Combine([this](int chunk) { return view(chunk); }, for_each);
}

std::optional<ChunkPiece> GradientStore::FirstNonFiniteOf(const NormBlocks::Place& place) const {
  std::optional<ChunkPiece> found;
  layout_.VisitRange(place.parameter, place.begin, place.end, [&](ChunkPiece piece) {
    const GradientView gradient = view(piece.chunk);
    for (int64_t i = 0; i < piece.elements && !found.has_value(); ++i) {
      if (std::isfinite(LoadElement(gradient.data, gradient.dtype, piece.chunk_offset + i)))
        continue;
      found = piece;
      found->parameter_offset += i;
      found->chunk_offset += i;
      found->elements = 1;
    }
  });
  return found;
}

std::optional<ChunkPiece> GradientStore::FirstNonFinite() const {
  for (int group = 0; group < layout_.group_count(); ++group) {
    for (const int parameter : layout_.parameters_of_group(group)) {
      const NormBlocks::Range blocks = sums_.blocks().BlocksOfParameter(parameter);
      for (int64_t block = blocks.begin; block < blocks.end; ++block) {
        if (std::isfinite(sums_.block_sum(block))) continue;
        if (auto found = FirstNonFiniteOf(sums_.blocks().PlaceOfBlock(block))) return found;
      }
    }
  }
  return std::nullopt;
}

bool GradientStore::HasNonZero(const ChunkPiece& piece, bool sums_current) const {
  if (is_zero(piece.chunk)) return false;
  const GradientView gradient = view(piece.chunk);
  const auto any = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (LoadElement(gradient.data, gradient.dtype, i) != 0) return true;
    }
    return false;
  };
  const int64_t end = piece.chunk_offset + piece.elements;
  if (piece.parameter == -1) return any(piece.chunk_offset, end);
  // No square of a gradient that is not zero is lost in a double. Parameters may be large, and the
  // job is locked meanwhile, so whole blocks are looked at by their sums.
  const NormBlocks::WholeBlocks whole = sums_.blocks().WholeIn(piece);
  if (any(piece.chunk_offset, whole.chunk_offset)) return true;
  const int64_t full = whole.elements / kBlockElements;
  for (int64_t i = 0; i < full; ++i) {
    double sum = 0;
    if (sums_current) {
      sum = sums_.block_sum(whole.blocks.begin + i);
    } else {
      const int64_t at = whole.chunk_offset + i * kBlockElements;
      const auto* data =
          static_cast<const std::byte*>(gradient.data) + at * SizeBytes(gradient.dtype);
      BlockSumsOfSquares(data, gradient.dtype, {&sum, 1});
    }
    if (sum != 0) return true;
  }
  return any(whole.chunk_offset + full * kBlockElements, end);
}

}  // namespace ballast
