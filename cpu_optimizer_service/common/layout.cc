#include "cpu_optimizer_service/common/layout.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "cpu_optimizer_service/common/status.h"

namespace ballast {
namespace {

int64_t RoundUpToBlocks(int64_t elements) {
  return (elements + kBlockElements - 1) / kBlockElements * kBlockElements;
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
        absl::StrCat("world_size is ", spec.world_size, ", must be between 1 and ", kMaxWorldSize));
  }
  if (spec.group_count < 1 || spec.group_count > kMaxGroups) {
    return absl::InvalidArgumentError(absl::StrCat("the job has ", spec.group_count,
                                                   " groups, must be between 1 and ", kMaxGroups));
  }
  if (static_cast<int64_t>(spec.parameters.size()) > kMaxParameters) {
    return absl::InvalidArgumentError(absl::StrCat("the job has ", spec.parameters.size(),
                                                   " parameters, at most ", kMaxParameters,
                                                   " are allowed"));
  }
  if (spec.chunk_elements < kBlockElements || spec.chunk_elements > kMaxChunkElements ||
      spec.chunk_elements % kBlockElements != 0) {
    return absl::InvalidArgumentError(absl::StrCat("chunk_elements is ", spec.chunk_elements,
                                                   ", must be a multiple of ", kBlockElements,
                                                   " and at most ", kMaxChunkElements));
  }
  return absl::OkStatus();
}

absl::Status CheckRange(const PartitionRange& range, int world_size,
                        absl::Span<const int64_t> flat_elements) {
  const std::string where = absl::StrCat("partition range [", range.begin, ", ", range.end,
                                         ") of group ", range.group, " for rank ", range.rank);
  if (range.rank < 0 || range.rank >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": the rank is not in a world of ", world_size));
  }
  if (range.group < 0 || range.group >= static_cast<int>(flat_elements.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": there are only ", flat_elements.size(), " groups"));
  }
  if (range.begin < 0 || range.end <= range.begin || range.end > flat_elements[range.group]) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": is empty or not within the group's ",
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
  BALLAST_RETURN_IF_ERROR(CheckBounds(spec));
  Layout layout;
  layout.flat_elements_.assign(spec.group_count, 0);
  layout.group_parameters_.resize(spec.group_count);
  layout.places_.reserve(spec.parameters.size());

  int64_t all_elements = 0;
  for (int index = 0; index < static_cast<int>(spec.parameters.size()); ++index) {
    const ParameterSpec& parameter = spec.parameters[index];
    if (parameter.name.empty()) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", index, " has no name"));
    }
    if (parameter.name == "__metadata__") {  // Checkpoints could not hold it.
      return absl::InvalidArgumentError(
          absl::StrCat("parameter ", index, " is named __metadata__, which safetensors reserves"));
    }
    if (!layout.by_name_.emplace(parameter.name, index).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("two parameters are named ", parameter.name, "; names must differ"));
    }
    if (parameter.group < 0 || parameter.group >= spec.group_count) {
      return absl::InvalidArgumentError(absl::StrCat("parameter ", parameter.name, " is in group ",
                                                     parameter.group, " but there are only ",
                                                     spec.group_count, " groups"));
    }
    ParameterPlace place;
    BALLAST_ASSIGN_OR_RETURN(place.elements, CountElements(parameter));
    all_elements += place.elements;
    if (all_elements > kMaxFlatElements) {
      return absl::InvalidArgumentError(
          absl::StrCat("the job has more than ", kMaxFlatElements, " elements"));
    }
    if (parameter.trainable) {
      place.offset = layout.flat_elements_[parameter.group];
      layout.flat_elements_[parameter.group] += place.elements;
      if (place.elements > 0) layout.group_parameters_[parameter.group].push_back(index);
    }
    layout.places_.push_back(place);
  }
  for (int64_t& elements : layout.flat_elements_) elements = RoundUpToBlocks(elements);

  std::vector<PartitionRange> ranges = spec.partitions;
  for (const PartitionRange& range : ranges) {
    BALLAST_RETURN_IF_ERROR(CheckRange(range, spec.world_size, layout.flat_elements_));
  }
  std::sort(ranges.begin(), ranges.end(), [](const auto& a, const auto& b) {
    return std::pair(a.group, a.begin) < std::pair(b.group, b.begin);
  });
  BALLAST_RETURN_IF_ERROR(CheckTiling(ranges, layout.flat_elements_));

  int64_t chunk_count = 0;
  for (const PartitionRange& range : ranges) {
    chunk_count += (range.end - range.begin + spec.chunk_elements - 1) / spec.chunk_elements;
  }
  if (chunk_count > kMaxChunks) {
    return absl::InvalidArgumentError(
        absl::StrCat("the layout has ", chunk_count, " chunks, at most ", kMaxChunks,
                     " are allowed; use larger chunks or fewer ranges"));
  }
  layout.chunks_.reserve(chunk_count);
  layout.chunks_of_rank_.resize(spec.world_size);
  for (const PartitionRange& range : ranges) {
    for (int64_t begin = range.begin; begin < range.end; begin += spec.chunk_elements) {
      layout.chunks_of_rank_[range.rank].push_back(static_cast<int>(layout.chunks_.size()));
      layout.chunks_.push_back({.group = range.group,
                                .begin = begin,
                                .elements = std::min(spec.chunk_elements, range.end - begin),
                                .rank = range.rank});
    }
  }
  for (int group = 0; group < spec.group_count; ++group) {
    const std::vector<int>& parameters = layout.group_parameters_[group];
    if (parameters.empty()) continue;
    const ParameterPlace& last = layout.places_[parameters.back()];
    const int64_t begin = last.offset + last.elements;
    const int64_t end = layout.flat_elements_[group];
    if (begin == end) continue;
    const int index = layout.ChunkAt(group, begin);  // Less than a block, so it lies in one.
    layout.padding_.push_back({.chunk = index,
                               .parameter = -1,
                               .chunk_offset = begin - layout.chunks_[index].begin,
                               .elements = end - begin});
  }
  layout.spec_ = std::move(spec);
  return layout;
}

int64_t Layout::total_flat_elements() const {
  int64_t total = 0;
  for (const int64_t elements : flat_elements_) total += elements;
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

size_t Layout::FirstParameterOf(const Chunk& chunk) const {
  const std::vector<int>& parameters = group_parameters_[chunk.group];
  // The last parameter that begins at or before the chunk holds its first element.
  const auto after = std::upper_bound(parameters.begin(), parameters.end(), chunk.begin,
                                      [&](int64_t at, int p) { return at < places_[p].offset; });
  return after == parameters.begin() ? 0 : after - parameters.begin() - 1;
}

std::vector<ChunkPiece> Layout::Pieces(int chunk) const {
  std::vector<ChunkPiece> pieces;
  VisitPieces(chunk, [&](const ChunkPiece& piece) { pieces.push_back(piece); });
  return pieces;
}

int Layout::ChunkAt(int group, int64_t element) const {
  const auto after = std::upper_bound(
      chunks_.begin(), chunks_.end(), std::pair(group, element),
      [](const auto& at, const Chunk& chunk) { return at < std::pair(chunk.group, chunk.begin); });
  return static_cast<int>(after - chunks_.begin()) - 1;
}

std::pair<int, int> Layout::ChunksOfParameter(int parameter) const {
  const ParameterPlace& place = places_[parameter];
  if (place.offset < 0 || place.elements == 0) return {0, 0};
  const int group = spec_.parameters[parameter].group;
  return {ChunkAt(group, place.offset), ChunkAt(group, place.offset + place.elements - 1) + 1};
}

int Layout::ParameterAt(int group, int64_t element) const {
  const std::vector<int>& parameters = group_parameters_[group];
  const auto after = std::upper_bound(parameters.begin(), parameters.end(), element,
                                      [&](int64_t at, int p) { return at < places_[p].offset; });
  if (after == parameters.begin()) return -1;
  const int parameter = *(after - 1);
  const ParameterPlace& place = places_[parameter];
  return element < place.offset + place.elements ? parameter : -1;
}

std::string Layout::FirstDifference(const Layout& other) const {
  const LayoutSpec& a = spec_;
  const LayoutSpec& b = other.spec_;
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
  if (a.parameters.size() != b.parameters.size()) {
    return differ("the number of parameters", a.parameters.size(), b.parameters.size());
  }
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
  }
  if (chunks_.size() != other.chunks_.size()) {
    return differ("the number of chunks", chunks_.size(), other.chunks_.size());
  }
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& c = chunks_[i];
    const Chunk& d = other.chunks_[i];
    if (c.begin != d.begin || c.elements != d.elements || c.group != d.group) {
      return differ(absl::StrCat("the range of chunk ", i),
                    absl::StrCat("[", c.begin, ", ", c.begin + c.elements, ") of group ", c.group),
                    absl::StrCat("[", d.begin, ", ", d.begin + d.elements, ") of group ", d.group));
    }
    if (c.rank != d.rank) return differ(absl::StrCat("the owner of chunk ", i), c.rank, d.rank);
  }
  return "";
}

std::vector<int64_t> FlatElements(absl::Span<const ParameterSpec> parameters, int group_count) {
  std::vector<int64_t> flat_elements(group_count, 0);
  for (const ParameterSpec& parameter : parameters) {
    if (!parameter.trainable) continue;
    int64_t elements = 1;
    for (const int64_t size : parameter.shape) elements *= size;
    flat_elements[parameter.group] += elements;
  }
  for (int64_t& elements : flat_elements) elements = RoundUpToBlocks(elements);
  return flat_elements;
}

}  // namespace ballast
