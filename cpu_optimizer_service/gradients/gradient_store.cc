#include "cpu_optimizer_service/gradients/gradient_store.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/float_format.h"
#include "cpu_optimizer_service/common/plan/memory_need.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/host/kept_record.h"
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
  // A transport cuts payloads anywhere, and kernels read whole elements at their own alignment.
  if (pieces.size() == 1 && reinterpret_cast<uintptr_t>(pieces[0].data()) % SizeBytes(dtype) == 0) {
    return pieces[0].data();
  }
  thread_local std::unique_ptr<std::byte[]> staging(
      new std::byte[kMaxChunkElements * SizeBytes(DType::kFloat32)]);
  Gather(pieces, staging.get());
  return staging.get();
}

// AddGradient from element `done` on, each turn recorded before it is stored.
void AddRecorded(float* sum, const std::byte* gradient, DType dtype, int64_t done, int64_t elements,
                 RedoLane& lane) {
  // The lane has a word already: of when it was taken, or of the turn that Resume has copied.
  RedoWriter redo(lane, RedoWord::Unpack(lane.word).chunk, done);
  while (done < elements) {
    const int64_t count = std::min(kSumTurnElements, elements - done);
    float* const turn = redo.next().values;
    std::copy_n(sum + done, count, turn);
    AddGradient(turn, gradient + done * SizeBytes(dtype), dtype, count);
    // Before the sum changes (redo_lane.h).
    redo.Record(count);
    Stored("a turn of a sum");
    std::copy_n(turn, count, sum + done);
    done += count;
  }
}

}  // namespace

GradientStore::GradientStore(const JobSpec& spec, const Layout& layout)
    : layout_(layout), chunks_(layout.chunks().size()), sums_(layout) {
  for (const GroupSpec& group : spec.groups) wire_dtypes_.push_back(group.wire_dtype);
}

absl::StatusOr<std::unique_ptr<GradientStore>> GradientStore::Create(const JobSpec& spec,
                                                                     const Layout& layout,
                                                                     ArenaFactory& arenas,
                                                                     NamedArenas* named) {
  std::unique_ptr<GradientStore> store(new GradientStore(spec, layout));
  const std::string label = absl::StrCat("job ", spec.name);
  store->owner_ = label;
  store->named_arenas_ = named;
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

void GradientStore::Add(int index, absl::Span<const absl::Span<const std::byte>> payload,
                        RedoLane* lane) {
  ChunkGradient& chunk = chunks_[index];
  const Chunk& place = layout_.chunks()[index];
  const DType dtype = wire_dtypes_[place.group];
  switch (chunk.form) {
    case Form::kNone:
    // Contributions before this one were empty and count as zeros, so this payload is all of the
    // sum so far.
    case Form::kZero: {
      std::byte* const to = PlaceForPayload(index);
      Gather(payload, to);
      chunk.first = to;
      chunk.form = Form::kWire;
      return;
    }
    // The first contribution is only read, and the ledger still says that it is all there is: a
    // process that dies here leaves the chunk as it was, so no lane is needed.
    case Form::kWire:
      Check(chunk.sum != nullptr, "a chunk that is summed has an accumulator");
      SumGradients(chunk.sum, chunk.first, Contiguous(payload, dtype), dtype, place.elements);
      chunk.form = Form::kSum;
      accumulators_in_use_.fetch_add(1);
      return;
    case Form::kSum:
      // Either this memory dies with the process, or no lane was free, and the ledger says
      // meanwhile that the gradient is lost (kept_job.h).
      if (lane == nullptr) {
        AddGradient(chunk.sum, Contiguous(payload, dtype), dtype, place.elements);
        return;
      }
      // What an earlier process had added of this contribution is not added twice.
      AddRecorded(chunk.sum, Contiguous(payload, dtype), dtype, std::exchange(chunk.sum_done, 0),
                  place.elements, *lane);
      return;
  }
}

void GradientStore::Resume(const RedoLane& lane) {
  const RedoWord word = RedoWord::Unpack(lane.word);
  ChunkGradient& chunk = chunks_[word.chunk];
  // The process may have died within its own copy of this turn. To copy the same values once more
  // does no harm where it had not.
  std::copy_n(lane.turns[word.turn].values, word.count, chunk.sum + word.done - word.count);
  chunk.sum_done = word.done;
}

int64_t GradientStore::PlaceBytes(int index) const {
  const Chunk& chunk = layout_.chunks()[index];
  return chunk.elements * SizeBytes(wire_dtypes_[chunk.group]);
}

// A place that is lent: the rank has not taken its last weights, which a worker does before it goes
// on; or another process has taken the rank, and what the older one left unread has not been
// dropped yet. So this is rare, and for a few chunks. In memory of this process alone the gradient
// would be lost with it, and, once its step is decided, the job.
absl::Status GradientStore::MakePlace(int index) {
  ChunkGradient& chunk = chunks_[index];
  // A second payload goes to the accumulator. A place that is free here stays free until Add: only
  // the update of a decided step lends places, and nothing is added during one.
  const bool needs_none = chunk.form == Form::kWire || chunk.form == Form::kSum ||
                          !places_->lent[index].load(std::memory_order_acquire);
  if (named_arenas_ == nullptr || needs_none || chunk.named_elsewhere != nullptr) {
    return absl::OkStatus();
  }
  auto arena =
      named_arenas_->Create(PlaceBytes(index), ElsewhereLabel(index), ArenaFactory::Touch::kNow);
  if (!arena.ok()) {
    return absl::UnavailableError(
        absl::StrCat("the buffer of chunk ", index, " of ", owner_,
                     " still holds its last weights, and the gradient needs another: ",
                     arena.status().message()));
  }
  chunk.named_elsewhere = *std::move(arena);
  return absl::OkStatus();
}

std::byte* GradientStore::PlaceForPayload(int index) {
  ChunkGradient& chunk = chunks_[index];
  // Acquires what the borrower's release gave back: its reads of the place are over before the
  // payload is written there. Nothing is read elsewhere any more, since the chunk has no payload
  // yet.
  if (!places_->lent[index].load(std::memory_order_acquire)) {
    chunk.elsewhere = nullptr;
    chunk.named_elsewhere = nullptr;
    return chunk.wire;
  }
  if (chunk.named_elsewhere != nullptr) return chunk.named_elsewhere->data();
  if (chunk.elsewhere == nullptr) chunk.elsewhere.reset(new std::byte[PlaceBytes(index)]);
  return chunk.elsewhere.get();
}

std::string GradientStore::ElsewhereLabel(int index) const {
  return absl::StrCat(owner_, " gradient of chunk ", index);
}

GradientStore::Kept GradientStore::kept(int index) const {
  const ChunkGradient& chunk = chunks_[index];
  switch (chunk.form) {
    case Form::kNone:
      return Kept::kNone;
    case Form::kZero:
      return Kept::kZero;
    case Form::kSum:
      return Kept::kSum;
    case Form::kWire:
      break;
  }
  if (chunk.first == chunk.wire) return Kept::kPlace;
  if (chunk.named_elsewhere != nullptr && chunk.first == chunk.named_elsewhere->data()) {
    return Kept::kElsewhere;
  }
  // What lies in no memory of the store is the rank's (Borrow).
  return chunk.elsewhere != nullptr && chunk.first == chunk.elsewhere.get() ? Kept::kLost
                                                                            : Kept::kBorrowed;
}

absl::Status GradientStore::Restore(int index, Kept kept, const std::byte* borrowed) {
  ChunkGradient& chunk = chunks_[index];
  const auto lost = [&](absl::string_view what) {
    return absl::DataLossError(
        absl::StrCat("the gradient of chunk ", index, " of ", owner_, " was ", what));
  };
  switch (kept) {
    case Kept::kNone:
      return absl::OkStatus();
    case Kept::kZero:
      chunk.form = Form::kZero;
      return absl::OkStatus();
    case Kept::kPlace:
      chunk.first = chunk.wire;
      chunk.form = Form::kWire;
      return absl::OkStatus();
    case Kept::kElsewhere: {
      auto arena = named_arenas_->Open(PlaceBytes(index), ElsewhereLabel(index));
      if (!arena.ok()) return lost(absl::StrCat("elsewhere: ", arena.status().message()));
      chunk.named_elsewhere = *std::move(arena);
      chunk.first = chunk.named_elsewhere->data();
      chunk.form = Form::kWire;
      return absl::OkStatus();
    }
    case Kept::kBorrowed:
      if (borrowed == nullptr) return lost("in memory of its rank that is gone");
      chunk.first = borrowed;
      chunk.form = Form::kWire;
      return absl::OkStatus();
    case Kept::kSum:
      // A job without accumulators never stored this form, so the word is not as it was stored.
      if (chunk.sum == nullptr) return lost("in an accumulator that is gone");
      chunk.form = Form::kSum;
      accumulators_in_use_.fetch_add(1);
      return absl::OkStatus();
    case Kept::kLost:
      return lost("in memory of the process that died");
  }
  // The form comes from three bits of the ledger's word, which may be damaged: 7 is none of the
  // above.
  return lost("of a form that is none");
}

WeightBuffer GradientStore::LendPlace(int index, int64_t size_bytes, bool may_go) {
  const ChunkGradient& chunk = chunks_[index];
  const bool read_there = chunk.form == Form::kWire && chunk.first == chunk.wire;
  const int64_t place_bytes = PlaceBytes(index);
  // Where the gradient is read there itself, element i of the weights replaces element i of the
  // gradient, so both need the same size.
  if (read_there ? size_bytes != place_bytes || !may_go : size_bytes > place_bytes) return {};
  // Acquires what the last borrower's release gave back: all its reads of the place are over.
  if (places_->lent[index].exchange(true, std::memory_order_acquire)) return {};
  // The loan keeps the places, not the store: weights may still be on their way when the job is
  // gone.
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
  // The bytes, and memory elsewhere, stay as they are: without a form nothing reads them, and the
  // place may still be lent when the next gradient comes.
  if (chunk.form == Form::kSum) accumulators_in_use_.fetch_sub(1);
  chunk.form = Form::kNone;
  chunk.first = nullptr;
  chunk.sum_done = 0;
}

void GradientStore::ClearAll() {
  for (int chunk = 0; chunk < static_cast<int>(chunks_.size()); ++chunk) Clear(chunk);
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
  // Sums of zeros are known, and kZeros need not be read for them.
  if (form == Form::kZero || form == Form::kNone) return sums_.ZeroChunk(index);
  return sums_.SumChunk(index, view(index));
}

PartSums GradientStore::CombineSums(SquareSums::ForEach for_each) {
  return sums_.Combine([this](int chunk) { return view(chunk); }, for_each);
}

std::optional<ChunkPiece> GradientStore::FirstNonFiniteOf(const NormBlocks::Place& place) const {
  std::optional<ChunkPiece> found;
  // A block may lie in several chunks, each with a format of its own.
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
        // A block's sum is finite exactly when all its elements are: gradient_norm.h.
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
  // Padding is in no block, so there are no sums of it.
  if (piece.parameter == -1) return any(piece.chunk_offset, end);
  // No square of a gradient that is not zero is lost in a double. Parameters may be large, and the
  // job is locked meanwhile, so whole blocks are looked at by their sums.
  const NormBlocks::WholeBlocks whole = sums_.blocks().WholeIn(piece);
  if (any(piece.chunk_offset, whole.chunk_offset)) return true;
  // What is left behind the full blocks, a short one or a part of one, is looked at element by
  // element, as is what is before them.
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
