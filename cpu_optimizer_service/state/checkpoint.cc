#include "cpu_optimizer_service/state/checkpoint.h"

#include <algorithm>
#include <atomic>
#include <functional>
#include <set>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/packed/packed_state.h"
#include "cpu_optimizer_service/common/status.h"
#include "cpu_optimizer_service/common/text/activity.h"
#include "cpu_optimizer_service/state/checkpoint_folder.h"

namespace ballast {
namespace {

// Saves that delete what is being read leave newer ones to be read.
constexpr int kMostReads = 3;
constexpr int64_t kBlock = int64_t{1} << 16;
// Files that are read at once, for their checksums.
constexpr int kThreads = 4;

std::string FilePath(const std::string& directory, const CheckpointIndex::File& file) {
  return absl::StrCat(directory, "/", file.name);
}

// Whether the checkpoint before may be taken. All but what is no fault of the checkpoint: this
// program may be too old for it, or have no memory for it.
bool IsDamage(const absl::Status& status) {
  return !absl::IsFailedPrecondition(status) && !absl::IsResourceExhausted(status);
}

// The first error, by number.
absl::Status ForEach(int count, const std::function<absl::Status(int)>& work) {
  std::vector<absl::Status> statuses(count);
  std::atomic<int> next = 0;
  Progress& progress = Progress::OfThisThread();
  const auto help = [&] {
    const CountsIn here(progress);
    for (int i = next++; i < count; i = next++) statuses[i] = work(i);
  };
  std::vector<std::jthread> threads;
  for (int i = 1; i < std::min(count, kThreads); ++i) threads.emplace_back(help);
  help();
  // Joins them, so that all have said what they found. The error that is told then does not depend
  // on which thread was faster.
  threads.clear();
  for (const absl::Status& status : statuses) BALLAST_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::StatusOr<SafetensorsFile> OpenFile(FileSystem& file_system, const std::string& path,
                                         const CheckpointIndex::File& file, int64_t most_bytes) {
  absl::StatusOr<std::unique_ptr<ReadableFile>> there = file_system.Open(path);
  if (absl::IsNotFound(there.status())) {
    // The index names the file, so there is a checkpoint, and it is damaged.
    return absl::DataLossError(absl::StrCat(path, " is missing; use another checkpoint"));
  }
  BALLAST_RETURN_IF_ERROR(there.status());
  if ((*there)->size_bytes() != file.written.size_bytes) {
    return absl::DataLossError(absl::StrCat(path, " has ", (*there)->size_bytes(),
                                            " bytes, expected ", file.written.size_bytes,
                                            "; use another checkpoint"));
  }
  return SafetensorsFile::Open(*std::move(there), path, most_bytes);
}

absl::Status NoUpdateLeaves(const std::string& path, Plane plane, const std::string& parameter,
                            float value, int64_t element) {
  return absl::DataLossError(
      absl::StrCat(path, ": ", Name(plane), " of ", parameter, " is ", value, " at element ",
                   element, ": an update never produces this; use another checkpoint"));
}

absl::Status Verify(const SafetensorsFile& opened, const std::string& path,
                    const CheckpointIndex::File& file) {
  // The planes whose square root the update takes. Values are looked at although there is a
  // checksum, because other programs write checkpoints as well (ballast.torch.to_checkpoint).
  const bool squares = IsOfSquares(file.plane) || IsScale(file.plane);
  BALLAST_ASSIGN_OR_RETURN(const SafetensorsFile::Contents contents,
                           opened.Examine(/*negative_is_bad=*/squares));
  if (contents.crc32 != file.written.crc32) {
    return absl::DataLossError(
        absl::StrCat(path, " does not match the checksum in index.json; use another checkpoint"));
  }
  if (contents.bad.has_value()) {
    return NoUpdateLeaves(path, file.plane, contents.bad->tensor, contents.bad->value,
                          contents.bad->element);
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<Checkpoint> Checkpoint::Open(FileSystem& file_system, const std::string& directory,
                                            int64_t most_bytes, const Needs& needs) {
  Checkpoint checkpoint;
  BALLAST_ASSIGN_OR_RETURN(checkpoint.index_, ReadIndex(file_system, directory, most_bytes));
  // By plane, as the index that was read has them.
  const std::vector<CheckpointIndex::File>& files = checkpoint.index_.files;
  std::set<std::string> names;
  for (const CheckpointIndex::Parameter& parameter : checkpoint.index_.parameters) {
    if (!names.insert(parameter.name).second) {
      return absl::DataLossError(absl::StrCat(IndexPath(directory), " lists ", parameter.name,
                                              " twice; use another checkpoint"));
    }
    if (parameter.format == StateFormat::kFloat32) continue;
    checkpoint.formats_[parameter.name] = parameter.format;
  }
  // All are open before the first is read: a save that deletes them then takes nothing away.
  std::vector<std::pair<Plane, int>> places;  // In planes_.
  for (const CheckpointIndex::File& file : files) {
    std::vector<SafetensorsFile>& opened = checkpoint.planes_[file.plane].files;
    places.emplace_back(file.plane, static_cast<int>(opened.size()));
    BALLAST_ASSIGN_OR_RETURN(opened.emplace_back(),
                             OpenFile(file_system, FilePath(directory, file), file, most_bytes));
  }
  for (const Plane plane : PlanesOf(checkpoint.index_)) {
    BALLAST_RETURN_IF_ERROR(checkpoint.FindPieces(directory, plane));
  }
  std::set<std::pair<Plane, int>> needed;
  for (const auto& [plane, in_plane] : checkpoint.planes_) {
    for (const auto& [parameter, pieces] : in_plane.pieces) {
      for (const Piece& piece : pieces) {
        const int64_t group = ElementsPerNumber(plane);
        if (needs != nullptr && !needs(parameter, piece.begin * group, piece.elements * group)) {
          continue;
        }
        needed.emplace(plane, piece.file);
      }
    }
  }
  std::vector<int> verified;
  for (int i = 0; i < static_cast<int>(files.size()); ++i) {
    if (needs != nullptr && !needed.contains(places[i])) continue;
    verified.push_back(i);
    Progress::OfThisThread().Expect(files[i].written.size_bytes);
  }
  BALLAST_RETURN_IF_ERROR(ForEach(static_cast<int>(verified.size()), [&](int number) {
    const int i = verified[number];
    return Verify(checkpoint.planes_[places[i].first].files[places[i].second],
                  FilePath(directory, files[i]), files[i]);
  }));
  std::vector<const CheckpointIndex::Parameter*> packed;
  for (const CheckpointIndex::Parameter& parameter : checkpoint.index_.parameters) {
    if (parameter.format != StateFormat::kFloat32) packed.push_back(&parameter);
  }
  BALLAST_RETURN_IF_ERROR(ForEach(static_cast<int>(packed.size()), [&](int i) {
    const CheckpointIndex::Parameter& parameter = *packed[i];
    BALLAST_ASSIGN_OR_RETURN(const std::optional<BadValue> bad,
                             checkpoint.FindBadValue(parameter, parameter.format, needs));
    return bad.has_value()
               ? NoUpdateLeaves(directory, bad->plane, parameter.name, bad->value, bad->element)
               : absl::OkStatus();
  }));
  return checkpoint;
}

absl::Status Checkpoint::FindPieces(const std::string& directory, Plane plane) {
  PlaneFiles& files = planes_[plane];
  std::vector<const CheckpointIndex::File*> in_plane;
  for (const CheckpointIndex::File& file : index_.files) {
    if (file.plane == plane) in_plane.push_back(&file);
  }
  for (const int parameter : ParametersWith(index_, plane)) {
    const CheckpointIndex::Parameter& p = index_.parameters[parameter];
    const TensorEntry whole = TensorOf(p, plane);
    const int64_t group = ElementsPerNumber(plane);
    std::vector<Piece>& pieces = files.pieces[p.name];
    bool fits = true;
    for (int i = 0; i < static_cast<int>(files.files.size()); ++i) {
      const TensorEntry* const entry = files.files[i].Find(p.name);
      if (entry == nullptr) continue;
      const auto cut = in_plane[i]->cut.find(p.name);
      if (cut == in_plane[i]->cut.end()) {
        fits = fits && entry->shape == whole.shape && entry->elements == whole.elements &&
               entry->type == whole.type;
        pieces.push_back({.elements = whole.elements, .file = i});
        continue;
      }
      fits = fits && entry->type == whole.type &&
             entry->elements == StoredCount(plane, cut->second.elements());
      if (!fits) break;  // Nor is it more than the file has.
      int64_t offset = 0;
      cut->second.VisitRange(0, cut->second.elements(), [&](int64_t begin, int64_t elements) {
        const int64_t behind = begin + elements;
        fits = fits && begin % group == 0 && (behind % group == 0 || behind == p.elements);
        const int64_t count = StoredCount(plane, elements);
        pieces.push_back({.begin = begin / group, .elements = count, .offset = offset, .file = i});
        offset += count;
      });
      fits = fits && offset == entry->elements;
    }
    std::ranges::sort(pieces, {}, &Piece::begin);
    // With an element in two places nobody would know which of them is right.
    int64_t end = 0;
    for (const Piece& piece : pieces) {
      fits = fits && piece.begin == end;
      end += piece.elements;
    }
    if (!fits || end != whole.elements) {
      return absl::DataLossError(absl::StrCat(directory, " does not hold ", Name(plane), " of ",
                                              p.name, " as index.json describes it"));
    }
  }
  return absl::OkStatus();
}

StateFormat Checkpoint::format(const std::string& parameter) const {
  const auto found = formats_.find(parameter);
  return found == formats_.end() ? StateFormat::kFloat32 : found->second;
}

template <class Read>
absl::Status Checkpoint::ReadPieces(const std::string& parameter, Plane stored, int64_t first,
                                    int64_t count, const Read& read) const {
  if (count == 0) return absl::OkStatus();
  const PlaneFiles& files = planes_.at(stored);
  const std::vector<Piece>& pieces = files.pieces.at(parameter);
  // The last one that begins there or before.
  auto piece = std::ranges::upper_bound(pieces, first, {}, &Piece::begin);
  for (--piece; count > 0; ++piece) {
    const int64_t within = first - piece->begin;
    const int64_t some = std::min(count, piece->elements - within);
    BALLAST_RETURN_IF_ERROR(read(files.files[piece->file], piece->offset + within, some));
    first += some;
    count -= some;
  }
  return absl::OkStatus();
}

absl::Status Checkpoint::ReadStored(const std::string& parameter, Plane stored, int64_t first,
                                    absl::Span<std::byte> out) const {
  const int64_t size = StoredBytes(format(parameter), stored, 1);
  return ReadPieces(parameter, stored, first, static_cast<int64_t>(out.size()) / size,
                    [&](const SafetensorsFile& file, int64_t offset, int64_t count) {
                      const auto piece = out.first(count * size);
                      out.remove_prefix(piece.size());
                      return file.ReadBytes(parameter, offset, piece);
                    });
}

absl::Status Checkpoint::Read(const std::string& parameter, Plane plane, int64_t offset,
                              absl::Span<float> out) const {
  if (format(parameter) == StateFormat::kFloat32) {
    return ReadPieces(parameter, plane, offset, static_cast<int64_t>(out.size()),
                      [&](const SafetensorsFile& file, int64_t from, int64_t count) {
                        const auto piece = out.first(count);
                        out.remove_prefix(count);
                        return file.Read(parameter, from, piece);
                      });
  }
  // Whole groups, in a slot of their own.
  const int64_t begin = offset / kPackedGroup * kPackedGroup;
  const int64_t elements = offset + static_cast<int64_t>(out.size()) - begin;
  Slot slot = {.format = format(parameter)};
  std::map<Plane, std::vector<float>> memory;  // As floats, for their alignment.
  const Plane only[] = {plane};
  for (const Plane stored : StoredPlanesOf(only, slot.format)) {
    if (!planes_.contains(stored) || !planes_.at(stored).pieces.contains(parameter)) continue;
    const int64_t bytes = StoredBytes(slot.format, stored, elements);
    std::vector<float>& to = memory[stored];
    to.resize(bytes / sizeof(float) + 1);
    slot.planes[static_cast<size_t>(stored)] = to.data();
    BALLAST_RETURN_IF_ERROR(
        ReadStored(parameter, stored, StoredCount(stored, begin),
                   absl::MakeSpan(reinterpret_cast<std::byte*>(to.data()), bytes)));
  }
  ReadPlane(slot, plane, offset - begin, out);
  return absl::OkStatus();
}

absl::StatusOr<std::optional<Checkpoint::BadValue>> Checkpoint::FindBadValue(
    const CheckpointIndex::Parameter& parameter, StateFormat format, const Needs& needs) const {
  // ReadIndex has refused a parameter without a group.
  const PlaneList planes = PlanesOf(index_.FindGroup(parameter.group)->hyper_parameters);
  std::vector<float> values(std::min(kBlock, parameter.elements));
  for (int64_t begin = 0; begin < parameter.elements; begin += kBlock) {
    const auto block = absl::MakeSpan(values).first(std::min(kBlock, parameter.elements - begin));
    if (needs != nullptr && !needs(parameter.name, begin, static_cast<int64_t>(block.size()))) {
      continue;
    }
    for (const Plane plane : planes) {
      BALLAST_RETURN_IF_ERROR(Read(parameter.name, plane, begin, block));
      const std::optional<int64_t> bad = FirstBadValue(plane, format, block);
      if (bad.has_value()) {
        return BadValue{.plane = plane, .element = begin + *bad, .value = block[*bad]};
      }
    }
  }
  return std::nullopt;
}

absl::StatusOr<OpenedCheckpoint> OpenNewest(FileSystem& file_system, const std::string& path,
                                            int64_t most_bytes, CheckpointUses* uses,
                                            const Checkpoint::Needs& needs) {
  // Each time the folder is listed anew, because a save deletes older checkpoints once a newer one
  // is complete.
  for (int attempt = 0; attempt < kMostReads; ++attempt) {
    BALLAST_ASSIGN_OR_RETURN(const std::vector<FoundCheckpoint> all,
                             FindCheckpoints(file_system, path));
    std::vector<std::string> passed_over;
    bool gone = false;
    // Of what has no index that can be read, nobody knows whether it is older.
    for (const FoundCheckpoint& found : all) {
      if (found.problem.ok()) continue;
      if (!IsDamage(found.problem) || all.size() == 1) return found.problem;
      passed_over.emplace_back(found.problem.message());
    }
    // Newest first, and those of the job that saved last before all others (ListCheckpoints).
    for (const FoundCheckpoint& found : all) {
      if (!found.problem.ok()) continue;
      const std::string& directory = found.facts.directory;
      // Before it is opened: what is open is then there until the use ends.
      CheckpointUses::Use use = uses != nullptr ? uses->Read(directory) : nullptr;
      if (uses != nullptr && use == nullptr) {
        gone = true;
        continue;
      }
      absl::StatusOr<Checkpoint> opened =
          Checkpoint::Open(file_system, directory, most_bytes, needs);
      if (opened.ok()) {
        return OpenedCheckpoint{.checkpoint = *std::move(opened),
                                .directory = directory,
                                .passed_over = std::move(passed_over),
                                .use = std::move(use)};
      }
      if (!file_system.Exists(IndexPath(directory))) {
        gone = true;  // Deleted meanwhile, because there is a newer one.
        continue;
      }
      if (!IsDamage(opened.status()) || all.size() == 1) return opened.status();
      passed_over.emplace_back(opened.status().message());
    }
    // At least one was found, and each was damaged, so there is a first line.
    if (!gone) {
      return absl::DataLossError(absl::StrCat(
          "no checkpoint in ", path, " can be loaded; the newest one fails: ", passed_over[0]));
    }
  }
  return absl::UnavailableError(
      absl::StrCat(path, ": the checkpoint was deleted while it was read, ", kMostReads,
                   " times in a row; load it again when no save is running"));
}

}  // namespace ballast
