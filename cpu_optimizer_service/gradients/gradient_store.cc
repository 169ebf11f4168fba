#include "cpu_optimizer_service/gradients/gradient_store.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/gradient_norm.h"
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
    : layout_(layout), chunks_(layout.chunks().size()) {
  for (const GroupSpec& group : spec.groups) wire_dtypes_.push_back(group.wire_dtype);
  for (int group = 0; group < layout.group_count(); ++group) {
    const int64_t blocks = layout.flat_blocks(group);
    const int64_t spans = (blocks + kSpanBlocks - 1) / kSpanBlocks;
    block_sums_.emplace_back(blocks, 0.0);
    span_sums_.push_back({.sums = std::vector<double>(spans, 0.0), .shared = {}});
  }
  std::vector<std::vector<bool>> whole;  // By group, by span.
  for (const SpanSums& spans : span_sums_) whole.emplace_back(spans.sums.size(), false);
  for (const Chunk& chunk : layout.chunks()) {
    const SpanRange spans = WholeSpansOf(chunk);
    for (int64_t s = spans.begin; s < spans.end; ++s) whole[chunk.group][s] = true;
  }
  for (size_t group = 0; group < whole.size(); ++group) {
    for (size_t s = 0; s < whole[group].size(); ++s) {
      if (!whole[group][s]) span_sums_[group].shared.push_back(static_cast<int64_t>(s));
    }
  }
}

GradientStore::SpanRange GradientStore::WholeSpansOf(const Chunk& chunk) const {
  const int64_t begin = chunk.begin / kBlockElements;
  const int64_t end = begin + chunk.elements / kBlockElements;
  SpanRange spans = {.begin = (begin + kSpanBlocks - 1) / kSpanBlocks, .end = end / kSpanBlocks};
  // The last one of the flat space may be shorter.
  if (end == layout_.flat_blocks(chunk.group)) spans.end = (end + kSpanBlocks - 1) / kSpanBlocks;
  return spans;
}

absl::Span<const double> GradientStore::BlocksOfSpan(int group, int64_t span) const {
  return absl::MakeConstSpan(block_sums_[group]).subspan(span * kSpanBlocks, kSpanBlocks);
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
  const ChunkGradient& chunk = chunks_[index];
  const Chunk& place = layout_.chunks()[index];
  const absl::Span<double> sums =
      absl::MakeSpan(block_sums_[place.group])
          .subspan(place.begin / kBlockElements, place.elements / kBlockElements);
  if (chunk.form == Form::kZero || chunk.form == Form::kNone) {
    std::fill(sums.begin(), sums.end(), 0.0);
  } else {
    const GradientView gradient = view(index);
    BlockSumsOfSquares(gradient.data, gradient.dtype, sums);
  }
  const SpanRange spans = WholeSpansOf(place);
  for (int64_t span = spans.begin; span < spans.end; ++span) {
    span_sums_[place.group].sums[span] = SumInOrder(BlocksOfSpan(place.group, span));
  }
}

double GradientStore::CombineSums(int group) {
  SpanSums& spans = span_sums_[group];
  for (const int64_t span : spans.shared) {
    spans.sums[span] = SumInOrder(BlocksOfSpan(group, span));
  }
  return SumInOrder(spans.sums);
}

bool GradientStore::HasNonZero(int index, int64_t begin, int64_t end, bool sums_current) const {
  if (is_zero(index)) return false;
  const Chunk& chunk = layout_.chunks()[index];
  const absl::Span<const double> sums = block_sums_[chunk.group];
  const GradientView gradient = view(index);
  for (int64_t i = begin; i < end;) {
    // No square of a gradient that is not zero is lost in a double. Parameters may be large, and
    // the job is locked meanwhile, so whole blocks are looked at by their sums.
    if (i % kBlockElements == 0 && end - i >= kBlockElements) {
      double sum = 0;
      if (sums_current) {
        sum = sums[i / kBlockElements];
      } else {
        const auto* data = static_cast<const std::byte*>(gradient.data) +
                           (i - chunk.begin) * SizeBytes(gradient.dtype);
        BlockSumsOfSquares(data, gradient.dtype, {&sum, 1});
      }
      if (sum != 0) return true;
      i += kBlockElements;
      continue;
    }
    if (LoadElement(gradient.data, gradient.dtype, i - chunk.begin) != 0) return true;
    ++i;
  }
  return false;
}

}  // namespace ballast
