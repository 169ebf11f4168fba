#include "cpu_optimizer_service/common/layout.h"

#include <algorithm>
#include <functional>
#include <map>
#include <numeric>
#include <queue>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/check.h"
#include "cpu_optimizer_service/common/rounding.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

absl::Status CheckChunkCount(int64_t chunks) {
  if (chunks <= kMaxChunks) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("the layout has ", chunks, " chunks, at most ", kMaxChunks,
                   " are allowed; use larger chunks or fewer ranges"));
}

std::string Describe(absl::Span<const MeshDim> mesh) {
  if (mesh.empty()) return "absent";
  return absl::StrCat("[",
                      absl::StrJoin(mesh, ", ",
                                    [](std::string* out, const MeshDim& dim) {
                                      absl::StrAppend(out, dim.name, " ", dim.size);
                                    }),
                      "]");
}

std::string Describe(absl::Span<const Placement> placements) {
  return absl::StrCat("[",
                      absl::StrJoin(placements, ", ",
                                    [](std::string* out, const Placement& placement) {
                                      if (placement.shard_dim == Placement::kReplicate) {
                                        absl::StrAppend(out, "Replicate");
                                      } else {
                                        absl::StrAppend(out, "Shard(", placement.shard_dim, ")");
                                      }
                                    }),
                      "]");
}

std::string Describe(const PartitionRange& range) {
  return absl::StrCat("[", range.begin, ", ", range.end, ") of group ", range.group, " for rank ",
                      range.rank);
}

// By (group, begin).
std::vector<PartitionRange> InOrder(std::vector<PartitionRange> ranges) {
  std::ranges::sort(ranges, {}, [](const auto& r) { return std::pair(r.group, r.begin); });
  return ranges;
}

int64_t Product(absl::Span<const int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t size : shape) elements *= size;
  return elements;
}

// Number of elements of a shape, or an error if it is negative or beyond kMaxFlatElements.
absl::StatusOr<int64_t> CountElements(const ParameterSpec& parameter) {
  int64_t elements = 1;
  bool has_zero = false;
  for (const int64_t size : parameter.shape) {
    if (size < 0) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", parameter.name,
                                                     " has a negative size, ", size,
                                                     "; sizes are zero or more"));
    }
    has_zero |= size == 0;
    // Also beside a zero, which would make the whole product fit: sizes are multiplied elsewhere
    // one after the other, and no part of that may overflow either.
    if (size > 0 && elements > kMaxFlatElements / size) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter ", parameter.name, " of shape [", absl::StrJoin(parameter.shape, ", "),
          "] has more than ", kMaxFlatElements, " elements"));
    }
    if (size > 0) elements *= size;
  }
  return has_zero ? 0 : elements;
}

absl::Status CheckBounds(const LayoutSpec& spec) {
  if (spec.world_size < 1 || spec.world_size > kMaxWorldSize) {
    return absl::InvalidArgumentError(
        absl::StrCat("world_size is ", spec.world_size, "; expected 1 to ", kMaxWorldSize));
  }
  if (spec.group_count < 1 || spec.group_count > kMaxGroups) {
    return absl::InvalidArgumentError(
        absl::StrCat("the job has ", spec.group_count, " groups; expected 1 to ", kMaxGroups));
  }
  if (static_cast<int64_t>(spec.parameters.size()) > kMaxParameters) {
    return absl::InvalidArgumentError(absl::StrCat("the job has ", spec.parameters.size(),
                                                   " parameters, at most ", kMaxParameters,
                                                   " are allowed"));
  }
  if (spec.chunk_elements < kBlockElements || spec.chunk_elements > kMaxChunkElements ||
      spec.chunk_elements % kBlockElements != 0) {
    return absl::InvalidArgumentError(absl::StrCat("chunk_elements is ", spec.chunk_elements,
                                                   "; expected a multiple of ", kBlockElements,
                                                   ", at most ", kMaxChunkElements));
  }
  return absl::OkStatus();
}

absl::Status CheckStates(const LayoutSpec& spec) {
  if (spec.states.empty() || static_cast<int>(spec.states.size()) == spec.group_count) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat("the layout has ", spec.states.size(),
                                                 " states; expected none, or one for each of ",
                                                 spec.group_count, " groups"));
}

// Where the next parameter of a group begins in its flat space, behind `elements`.
int64_t NextOffset(const LayoutSpec& spec, int group, int64_t elements) {
  return spec.is_packed(group) ? RoundUp(elements, kBlockElements) : elements;
}

absl::Status CheckSizes(const ParameterSpec& parameter, int index) {
  if (parameter.name.size() > kMaxParameterNameBytes) {
    // A peer may send a name as long as a message; the error quotes only its beginning.
    return absl::InvalidArgumentError(absl::StrCat(
        "the name of parameter ", index, ", '", parameter.name.substr(0, 64), "...', has ",
        parameter.name.size(), " bytes; expected at most ", kMaxParameterNameBytes));
  }
  if (parameter.shape.size() > kMaxDimensions) {
    return absl::InvalidArgumentError(
        absl::StrCat("parameter ", parameter.name, " has ", parameter.shape.size(),
                     " dimensions; expected at most ", kMaxDimensions));
  }
  return absl::OkStatus();
}

absl::Status CheckRange(const PartitionRange& range, int world_size,
                        absl::Span<const int64_t> flat_elements) {
  const std::string where = absl::StrCat("partition range ", Describe(range));
  if (range.rank < 0 || range.rank >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": expected a rank below world_size ", world_size));
  }
  if (range.group < 0 || range.group >= static_cast<int>(flat_elements.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": the job has ", flat_elements.size(), " groups"));
  }
  if (range.begin < 0 || range.end <= range.begin || range.end > flat_elements[range.group]) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": it is empty or exceeds the group's ",
                                                   flat_elements[range.group], " elements"));
  }
  if (range.begin % kBlockElements != 0 || range.end % kBlockElements != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": edges must be multiples of ", kBlockElements, " elements"));
  }
  return absl::OkStatus();
}

// `ranges` are sorted by (group, begin). They must tile every flat space.
absl::Status CheckTiling(absl::Span<const PartitionRange> ranges,
                         absl::Span<const int64_t> flat_elements) {
  // The ranges are sorted and none is empty, so one edge that moves on finds gaps and overlaps.
  auto next = ranges.begin();
  for (int group = 0; group < static_cast<int>(flat_elements.size()); ++group) {
    int64_t covered = 0;
    for (; next != ranges.end() && next->group == group; ++next) {
      if (next->begin != covered) {
        const bool overlap = next->begin < covered;
        return absl::InvalidArgumentError(
            absl::StrCat("the partitions of group ", group,
                         overlap ? " overlap in elements [" : " leave out elements [",
                         std::min(next->begin, covered), ", ",
                         overlap ? std::min(next->end, covered) : next->begin,
                         "): they must tile its flat space exactly"));
      }
      covered = next->end;
    }
    // What lies behind the last range, and a group that no range names, is found here.
    if (covered != flat_elements[group]) {
      return absl::InvalidArgumentError(
          absl::StrCat("the partitions of group ", group, " leave out elements [", covered, ", ",
                       flat_elements[group], "): they must tile its flat space exactly"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Layout> Layout::Create(LayoutSpec spec) {
  // A wrong world size makes no list: it is refused below.
  std::vector<int> all(std::clamp(spec.world_size, 0, kMaxWorldSize));
  std::iota(all.begin(), all.end(), 0);
  return CreateForRanks(std::move(spec), std::move(all));
}

absl::StatusOr<Layout> Layout::CreateForRanks(LayoutSpec spec, std::vector<int> ranks) {
  // This comes before any table is made: tables are as long as a peer's description says.
  BALLAST_RETURN_IF_ERROR(CheckParameters(spec));
  Layout layout;
  layout.spec_ = std::move(spec);
  BALLAST_RETURN_IF_ERROR(layout.UseRanks(std::move(ranks)));
  layout.chunks_of_rank_.resize(layout.world_size());
  layout.flat_elements_.assign(layout.group_count(), 0);
  layout.group_parameters_.resize(layout.group_count());
  BALLAST_RETURN_IF_ERROR(layout.AddParameters());
  BALLAST_RETURN_IF_ERROR(layout.has_mesh() ? layout.CutShards() : layout.CutFlatSpaces());
  layout.FindPadding();
  return layout;
}

absl::Status Layout::UseRanks(std::vector<int> ranks) {
  ranks_ = std::move(ranks);
  index_of_rank_.assign(world_size(), -1);
  for (int index = 0; index < static_cast<int>(ranks_.size()); ++index) {
    const int rank = ranks_[index];
    if (rank < 0 || rank >= world_size()) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " is not below world_size ", world_size()));
    }
    Check(index == 0 || ranks_[index - 1] < rank, "the ranks of a layout ascend");
    index_of_rank_[rank] = index;
  }
  return absl::OkStatus();
}

absl::Status Layout::AddParameters() {
  places_.reserve(spec_.parameters.size());
  for (int index = 0; index < static_cast<int>(spec_.parameters.size()); ++index) {
    const ParameterSpec& parameter = spec_.parameters[index];
    if (!by_name_.emplace(parameter.name, index).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("two parameters are named ", parameter.name, "; names must differ"));
    }
    const ParameterPlace place = {.elements = Product(parameter.shape)};
    // A parameter of no elements has no part in a space, and so none in chunks and sums.
    if (parameter.trainable && place.elements > 0) {
      group_parameters_[parameter.group].push_back(index);
    }
    places_.push_back(place);
  }
  return absl::OkStatus();
}

bool Layout::MayBePacked(int parameter) const {
  const ParameterSpec& spec = spec_.parameters[parameter];
  return spec.trainable && spec.shape.size() >= 2 &&
         places_[parameter].elements >= kLeastPackedElements && spec_.is_packed(spec.group);
}

bool Layout::fell_back(int parameter) const {
  return MayBePacked(parameter) && formats_[parameter] == StateFormat::kFloat32;
}

absl::Status Layout::ChooseFormats() {
  formats_.assign(spec_.parameters.size(), StateFormat::kFloat32);
  for (int index = 0; index < static_cast<int>(spec_.parameters.size()); ++index) {
    const ParameterSpec& parameter = spec_.parameters[index];
    const StateSpec state = spec_.state(parameter.group);
    if (!MayBePacked(index)) continue;
    if (has_mesh() &&
        !AreRunsWhole(parameter.shape, parameter.placements, spec_.mesh, kPackedGroup)) {
      if (state.fallback) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "the shards of parameter ", parameter.name, " cut its groups of ", kPackedGroup,
          " elements, so it cannot have ", Name(state.format),
          " state; place it otherwise, or let its group fall back to fp32 for such parameters"));
    }
    formats_[index] = state.format;
  }
  return absl::OkStatus();
}

absl::Status Layout::CutFlatSpaces() {
  BALLAST_RETURN_IF_ERROR(ChooseFormats());
  spaces_.resize(group_count());
  for (int index = 0; index < static_cast<int>(spec_.parameters.size()); ++index) {
    const ParameterSpec& parameter = spec_.parameters[index];
    if (!parameter.placements.empty()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "parameter ", parameter.name, " has placements, but the job describes no mesh"));
    }
    if (!parameter.trainable) continue;
    ParameterPlace& place = places_[index];
    Space& space = spaces_[parameter.group];
    // Also a parameter of no elements has a place, which the protocol tells, but no part of the
    // space.
    place.offset = NextOffset(spec_, parameter.group, space.elements);
    if (place.elements == 0) continue;
    space.parts.push_back({.parameter = index, .begin = place.offset, .elements = place.elements});
    space.elements = place.offset + place.elements;
  }
  // Of a group in fp32 only the end is padded: parameters lie close to one another.
  for (int group = 0; group < group_count(); ++group) {
    flat_elements_[group] = RoundUp(spaces_[group].elements, kBlockElements);
  }

  // The description may give ranges in any order. Each is checked by itself first, since
  // CheckTiling relies on ranges that are not empty and lie within their group.
  for (const PartitionRange& range : spec_.partitions) {
    BALLAST_RETURN_IF_ERROR(CheckRange(range, world_size(), flat_elements_));
  }
  std::vector<PartitionRange> ranges = InOrder(spec_.partitions);
  BALLAST_RETURN_IF_ERROR(CheckTiling(ranges, flat_elements_));
  std::erase_if(ranges, [&](const PartitionRange& range) { return !has_rank(range.rank); });
  std::ranges::stable_sort(ranges, {}, &PartitionRange::rank);
  // Counted before any chunk is made: a few bytes can describe more than there is memory for.
  int64_t chunk_count = 0;
  for (const PartitionRange& range : ranges) {
    chunk_count += CountChunks(spaces_[range.group], range.begin, range.end);
  }
  BALLAST_RETURN_IF_ERROR(CheckChunkCount(chunk_count));
  chunks_.reserve(chunk_count);
  for (const PartitionRange& range : ranges) {
    AddChunks(range.rank, range.group, range.begin, range.end);
  }
  by_place_.resize(chunk_count);
  std::iota(by_place_.begin(), by_place_.end(), 0);
  std::ranges::sort(by_place_, {}, [&](int chunk) {
    return std::pair(chunks_[chunk].group, chunks_[chunk].begin);
  });
  return absl::OkStatus();
}

absl::StatusOr<std::vector<int>> OwningReplicas(const LayoutSpec& spec) {
  std::vector<int> owners(spec.parameters.size(), 0);
  // By the dimensions that replicate, as bits: the replicas and what they own, the fewest first.
  using Owned = std::pair<int64_t, int>;
  using FewestFirst = std::priority_queue<Owned, std::vector<Owned>, std::greater<>>;
  std::map<uint64_t, FewestFirst> owned;
  int64_t replicas = 0;
  for (size_t p = 0; p < spec.parameters.size(); ++p) {
    const ParameterSpec& parameter = spec.parameters[p];
    if (!parameter.trainable) continue;
    uint64_t replicating = 0;
    int count = 1;
    for (size_t m = 0; m < spec.mesh.size(); ++m) {
      if (parameter.placements[m].shard_dim != Placement::kReplicate) continue;
      replicating |= uint64_t{1} << m;
      count *= spec.mesh[m].size;
    }
    if (count == 1) continue;
    auto& of_dims = owned[replicating];
    if (of_dims.empty()) {
      replicas += count;
      if (replicas > kMaxShards) {
        return absl::InvalidArgumentError(
            absl::StrCat("the parameters up to ", parameter.name, " have more than ", kMaxShards,
                         " replicas over different dimensions of the mesh; place them alike"));
      }
      std::vector<Owned> none(count);
      for (int replica = 0; replica < count; ++replica) none[replica] = {0, replica};
      of_dims = FewestFirst({}, std::move(none));
    }
    const auto [elements, replica] = of_dims.top();
    of_dims.pop();
    owners[p] = replica;
    of_dims.emplace(elements + Product(parameter.shape), replica);
  }
  return owners;
}

absl::Status Layout::CutShards() {
  if (spec_.mesh.size() > kMaxDimensions) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the mesh has ", spec_.mesh.size(), " dimensions; expected at most ", kMaxDimensions));
  }
  BALLAST_RETURN_IF_ERROR(CheckMesh(spec_.mesh, world_size()));
  if (!spec_.partitions.empty()) {
    return absl::InvalidArgumentError(
        "the job describes both a mesh and partitions; leave out one of them");
  }
  for (const ParameterSpec& parameter : spec_.parameters) {
    // A frozen parameter lies in no space, so it needs no placements; those that it has must fit.
    if (!parameter.trainable && parameter.placements.empty()) continue;
    BALLAST_RETURN_IF_ERROR(
        Annotate(CheckPlacements(parameter.placements, spec_.mesh, parameter.shape),
                 absl::StrCat("parameter ", parameter.name)));
  }
  BALLAST_RETURN_IF_ERROR(ChooseFormats());
  BALLAST_ASSIGN_OR_RETURN(owners_, OwningReplicas(spec_));
  // The loop below computes a shard of every parameter for every rank, so this bounds its time.
  const auto things = static_cast<int64_t>(spec_.parameters.size()) + group_count();
  const auto here = static_cast<int64_t>(ranks_.size());
  if (things * here > kMaxShards) {
    return absl::InvalidArgumentError(absl::StrCat(
        spec_.parameters.size(), " parameters in ", group_count(), " groups on ", here,
        " ranks are more than ", kMaxShards, " shards; merge parameters, or use fewer ranks"));
  }
  spaces_.resize(here * group_count());
  // The first loop lays out the spaces and counts chunks. The chunks are made after it, when their
  // number is known to be allowed.
  int64_t chunk_count = 0;
  for (const int rank : ranks_) {
    for (int group = 0; group < group_count(); ++group) {
      Space& space = spaces_[index_of_rank_[rank] * group_count() + group];
      for (const int parameter : group_parameters_[group]) {
        const int64_t elements = ShardsOf(parameter).OfRank(rank).elements();
        if (elements == 0) continue;
        space.parts.push_back(
            {.parameter = parameter, .begin = space.elements, .elements = elements});
        // The sum is rounded after each shard: the next one begins aligned, and so does the space's
        // end.
        space.elements = RoundUp(space.elements + elements,
                                 spec_.is_packed(group) ? kPackedGroup : kShardAlignmentElements);
      }
      // The count fits an int here: it was checked at the end of the last turn.
      space.first_chunk = static_cast<int>(chunk_count);
      chunk_count += CountChunks(space, 0, space.elements);
      space.end_chunk = static_cast<int>(std::min(chunk_count, kMaxChunks));
      flat_elements_[group] += space.elements;
      BALLAST_RETURN_IF_ERROR(CheckChunkCount(chunk_count));
    }
  }
  chunks_.reserve(chunk_count);
  for (const int rank : ranks_) {
    for (int group = 0; group < group_count(); ++group) {
      AddChunks(rank, group, 0, SpaceOf(rank, group).elements);
    }
  }
  return absl::OkStatus();
}

template <class Visit>
void Layout::VisitFormats(const Space& space, int64_t begin, int64_t end,
                          const Visit& visit) const {
  size_t i = FirstPartAt(space, begin);
  while (begin < end) {
    // Padding goes with what is before it, and at the end of a space there is nothing else.
    const auto format_of = [&](size_t part) { return formats_[space.parts[part].parameter]; };
    const StateFormat format = i < space.parts.size() ? format_of(i) : format_of(i - 1);
    while (i < space.parts.size() && space.parts[i].begin < end && format_of(i) == format) ++i;
    const int64_t until = i < space.parts.size() ? std::min(space.parts[i].begin, end) : end;
    visit(begin, until, format);
    begin = until;
  }
}

int64_t Layout::CountChunks(const Space& space, int64_t begin, int64_t end) const {
  int64_t count = 0;
  VisitFormats(space, begin, end, [&](int64_t first, int64_t until, StateFormat) {
    count += DivideUp(until - first, spec_.chunk_elements);
  });
  return count;
}

void Layout::AddChunks(int rank, int group, int64_t begin, int64_t end) {
  VisitFormats(SpaceOf(rank, group), begin, end,
               [&](int64_t first, int64_t until, StateFormat format) {
                 for (; first < until; first += spec_.chunk_elements) {
                   chunks_of_rank_[rank].push_back(static_cast<int>(chunks_.size()));
                   chunks_.push_back({.group = group,
                                      .begin = first,
                                      .elements = std::min(spec_.chunk_elements, until - first),
                                      .rank = rank,
                                      .format = format});
                 }
               });
}

int Layout::ChunkIn(const Space& space, int64_t element) const {
  const auto chunks =
      absl::MakeConstSpan(chunks_).subspan(space.first_chunk, space.end_chunk - space.first_chunk);
  const auto behind = std::ranges::upper_bound(chunks, element, {}, &Chunk::begin);
  return space.first_chunk + static_cast<int>(behind - chunks.begin()) - 1;
}

void Layout::FindPadding() {
  // Parts come in order of their offsets, so padding is what lies between them and after the last.
  for (int chunk = 0; chunk < static_cast<int>(chunks_.size()); ++chunk) {
    int64_t covered = 0;
    const auto add_until = [&](int64_t offset) {
      if (covered == offset) return;
      padding_.push_back(
          {.chunk = chunk, .parameter = -1, .chunk_offset = covered, .elements = offset - covered});
    };
    VisitParts(chunk, [&](const ChunkPart& part) {
      // What lies between the parts before this one and its begin belongs to no parameter.
      add_until(part.chunk_offset);
      covered = part.chunk_offset + part.elements;
      return true;
    });
    add_until(chunks_[chunk].elements);
  }
}

absl::Span<const ChunkPiece> Layout::padding_of(int chunk) const {
  // FindPadding visits chunks in their order, so padding_ is sorted by chunk.
  const auto first = std::partition_point(padding_.begin(), padding_.end(),
                                          [&](const ChunkPiece& p) { return p.chunk < chunk; });
  const auto last = std::partition_point(first, padding_.end(),
                                         [&](const ChunkPiece& p) { return p.chunk == chunk; });
  return absl::MakeConstSpan(padding_).subspan(first - padding_.begin(), last - first);
}

int64_t Layout::total_elements() const {
  int64_t total = 0;
  for (const Chunk& chunk : chunks_) total += chunk.elements;
  return total;
}

int Layout::FindParameter(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? -1 : found->second;
}

int64_t Layout::partition_elements(int rank) const {
  int64_t total = 0;
  for (const int chunk : chunks_of_rank_[rank]) total += chunks_[chunk].elements;
  return total;
}

size_t Layout::FirstPartAt(const Space& space, int64_t begin) {
  // Parts do not overlap, so their ends ascend as their begins do.
  const auto first =
      std::partition_point(space.parts.begin(), space.parts.end(),
                           [&](const Part& part) { return part.begin + part.elements <= begin; });
  return first - space.parts.begin();
}

int64_t Layout::BeginOfParameter(const Space& space, int parameter) {
  // Parts lie in the order of declaration, so their parameters ascend.
  // Callers ask only for parameters of which the space has elements, so one is found.
  return std::partition_point(space.parts.begin(), space.parts.end(),
                              [&](const Part& part) { return part.parameter < parameter; })
      ->begin;
}

std::vector<ChunkPiece> Layout::Pieces(int chunk) const {
  std::vector<ChunkPiece> pieces;
  VisitPieces(chunk, [&](const ChunkPiece& piece) { pieces.push_back(piece); });
  return pieces;
}

ChunkPiece Layout::PieceAt(int chunk, int64_t chunk_offset) const {
  ChunkPiece found = {.chunk = chunk, .parameter = -1, .chunk_offset = chunk_offset, .elements = 1};
  // It looks at every piece of the chunk. Callers ask only for the one element that they refuse.
  VisitPieces(chunk, [&](const ChunkPiece& piece) {
    const int64_t at = chunk_offset - piece.chunk_offset;
    if (at < 0 || at >= piece.elements) return;
    found.parameter = piece.parameter;
    found.parameter_offset = piece.parameter_offset + at;
  });
  return found;
}

size_t Layout::FirstPlaceAt(int group, int64_t element) const {
  // Chunks do not overlap, so their ends ascend as their begins do.
  const auto first = std::ranges::partition_point(by_place_, [&](int index) {
    const Chunk& chunk = chunks_[index];
    return std::pair(chunk.group, chunk.begin + chunk.elements - 1) < std::pair(group, element);
  });
  return first - by_place_.begin();
}

int Layout::ChunkAt(int group, int64_t element) const {
  return by_place_[FirstPlaceAt(group, element)];
}

std::vector<int> Layout::ChunksOfParameter(int parameter) const {
  std::vector<int> chunks;
  const ParameterPlace& place = places_[parameter];
  const ParameterSpec& spec = spec_.parameters[parameter];
  if (!spec.trainable || place.elements == 0) return chunks;
  if (!has_mesh()) {
    VisitRange(parameter, 0, place.elements,
               [&](const ChunkPiece& piece) { chunks.push_back(piece.chunk); });
    std::ranges::sort(chunks);
    return chunks;
  }
  for (const int rank : ranks_) {
    const int64_t elements = ShardsOf(parameter).OfRank(rank).elements();
    if (elements == 0) continue;
    const Space& space = SpaceOf(rank, spec.group);
    const int64_t begin = BeginOfParameter(space, parameter);
    const int last = ChunkIn(space, begin + elements - 1);
    for (int chunk = ChunkIn(space, begin); chunk <= last; ++chunk) chunks.push_back(chunk);
  }
  return chunks;
}

ElementRange Layout::RangeOfParameter(int parameter) const {
  const int64_t elements = places_[parameter].elements;
  if (static_cast<int>(ranks_.size()) == world_size()) return {0, elements};
  ElementRange range = {elements, 0};
  const auto add = [&](int64_t begin, int64_t end) {
    range = {std::min(range.begin, begin), std::max(range.end, end)};
  };
  if (has_mesh()) {
    for (const int rank : ranks_) {
      const Shard shard = ShardsOf(parameter).OfRank(rank);
      if (shard.elements() == 0) continue;
      add(shard.OffsetInParameter(0), shard.OffsetInParameter(shard.elements() - 1) + 1);
    }
  } else {
    VisitRange(parameter, 0, elements, [&](const ChunkPiece& piece) {
      add(piece.parameter_offset, piece.parameter_offset + piece.elements);
    });
  }
  return range.begin < range.end ? range : ElementRange();
}

int Layout::ParameterAt(int group, int64_t element) const {
  const Space& space = spaces_[group];
  const size_t index = FirstPartAt(space, element);
  const bool is_in = index < space.parts.size() && space.parts[index].begin <= element;
  return is_in ? space.parts[index].parameter : -1;
}

std::string FirstDifference(const LayoutSpec& a, const LayoutSpec& b) {
  const auto differ = [](absl::string_view what, const auto& x, const auto& y) {
    return absl::StrCat(what, " is ", x, " here and ", y, " there");
  };
  if (a.world_size != b.world_size) return differ("world_size", a.world_size, b.world_size);
  if (a.group_count != b.group_count) {
    return differ("the number of groups", a.group_count, b.group_count);
  }
  if (a.chunk_elements != b.chunk_elements) {
    return differ("chunk_elements", a.chunk_elements, b.chunk_elements);
  }
  for (int group = 0; group < a.group_count; ++group) {
    if (a.state(group) == b.state(group)) continue;
    const auto describe = [](const StateSpec& state) {
      return absl::StrCat(Name(state.format), state.fallback ? " with fallback" : "");
    };
    return differ(absl::StrCat("the state of group ", group), describe(a.state(group)),
                  describe(b.state(group)));
  }
  if (a.parameters.size() != b.parameters.size()) {
    return differ("the number of parameters", a.parameters.size(), b.parameters.size());
  }
  // The mesh is compared before the placements, which mean something only on the same mesh.
  if (a.mesh != b.mesh) return differ("the mesh", Describe(a.mesh), Describe(b.mesh));
  for (size_t i = 0; i < a.parameters.size(); ++i) {
    const ParameterSpec& p = a.parameters[i];
    const ParameterSpec& q = b.parameters[i];
    if (p.name != q.name) return differ(absl::StrCat("parameter ", i), p.name, q.name);
    if (p.shape != q.shape) {
      return differ(absl::StrCat("the shape of parameter ", p.name),
                    absl::StrCat("[", absl::StrJoin(p.shape, ", "), "]"),
                    absl::StrCat("[", absl::StrJoin(q.shape, ", "), "]"));
    }
    if (p.group != q.group) {
      return differ(absl::StrCat("the group of parameter ", p.name), p.group, q.group);
    }
    if (p.trainable != q.trainable) {
      return differ(absl::StrCat("parameter ", p.name), p.trainable ? "trainable" : "frozen",
                    q.trainable ? "trainable" : "frozen");
    }
    // A frozen parameter lies in no space, so it makes no difference how it would be placed.
    if (p.trainable && p.placements != q.placements) {
      return differ(absl::StrCat("the placement of parameter ", p.name), Describe(p.placements),
                    Describe(q.placements));
    }
  }
  // Ranges may come in any order.
  const std::vector<PartitionRange> here = InOrder(a.partitions);
  const std::vector<PartitionRange> there = InOrder(b.partitions);
  if (here.size() != there.size()) {
    return differ("the number of partition ranges", here.size(), there.size());
  }
  for (size_t i = 0; i < here.size(); ++i) {
    if (here[i] == there[i]) continue;
    return differ(absl::StrCat("partition range ", i), Describe(here[i]), Describe(there[i]));
  }
  return "";
}

absl::Status CheckParameters(const LayoutSpec& spec) {
  BALLAST_RETURN_IF_ERROR(CheckBounds(spec));
  BALLAST_RETURN_IF_ERROR(CheckStates(spec));
  int64_t all_elements = 0;
  for (int index = 0; index < static_cast<int>(spec.parameters.size()); ++index) {
    const ParameterSpec& parameter = spec.parameters[index];
    if (parameter.name.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", index, " has no name"));
    }
    BALLAST_RETURN_IF_ERROR(CheckSizes(parameter, index));
    if (parameter.name == "__metadata__") {  // Checkpoints could not hold it.
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", index, " is named __metadata__, which safetensors reserves"));
    }
    if (parameter.group < 0 || parameter.group >= spec.group_count) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", parameter.name, " is in group ",
                                                     parameter.group, " but there are only ",
                                                     spec.group_count, " groups"));
    }
    BALLAST_ASSIGN_OR_RETURN(const int64_t elements, CountElements(parameter));
    // Compared after each parameter, none of which has more than the bound: it cannot overflow.
    all_elements += elements;
    if (all_elements > kMaxFlatElements) {
      return absl::InvalidArgumentError(
          absl::StrCat("the job has more than ", kMaxFlatElements, " elements"));
    }
  }
  return absl::OkStatus();
}

std::vector<int64_t> FlatElements(const LayoutSpec& spec) {
  std::vector<int64_t> flat_elements(spec.group_count, 0);
  for (const ParameterSpec& parameter : spec.parameters) {
    // Nothing is checked here: callers have to see that groups are in range and that products fit.
    const int64_t elements = parameter.trainable ? Product(parameter.shape) : 0;
    if (elements == 0) continue;
    int64_t& end = flat_elements[parameter.group];
    end = NextOffset(spec, parameter.group, end) + elements;
  }
  for (int64_t& elements : flat_elements) elements = RoundUp(elements, kBlockElements);
  return flat_elements;
}

}  // namespace ballast
