#include "gpu_worker/data.h"

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/random.h"

namespace ballast::worker {
namespace {

namespace fs = std::filesystem;

absl::Status Unreadable(const std::string& path) {
  return absl::NotFoundError(absl::StrCat("cannot read the text ", path,
                                          "; give a readable file or a directory of plain files "
                                          "with --text"));
}

absl::Status AppendFile(const std::string& path, std::string& text) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return Unreadable(path);
  text.append(std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>());
  return file.bad() ? Unreadable(path) : absl::OkStatus();
}

// The plain files of a directory, links resolved, so that GPL -> GPL-3 does not count twice.
absl::StatusOr<std::set<std::string>> FilesOf(const std::string& directory) {
  std::error_code error;
  std::set<std::string> files;
  fs::directory_iterator entries(directory, error);
  if (error) return Unreadable(directory);
  for (const fs::directory_entry& entry : entries) {
    if (!entry.is_regular_file(error)) continue;
    const fs::path file = fs::canonical(entry.path(), error);
    if (!error) files.insert(file.string());
  }
  return files;
}

}  // namespace

absl::StatusOr<TextData> TextData::Read(const std::string& path, int context) {
  std::error_code error;
  std::string text;
  if (fs::is_directory(path, error)) {
    BALLAST_ASSIGN_OR_RETURN(const std::set<std::string> files, FilesOf(path));
    for (const std::string& file : files) BALLAST_RETURN_IF_ERROR(AppendFile(file, text));
  } else {
    if (!fs::is_regular_file(path, error)) return Unreadable(path);  // A device may never end.
    BALLAST_RETURN_IF_ERROR(AppendFile(path, text));
  }
  return FromText(std::move(text), path, context);
}

absl::StatusOr<TextData> TextData::FromText(std::string text, const std::string& name,
                                            int context) {
  if (static_cast<int64_t>(text.size()) <= context) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text ", name, " has ", text.size(), " bytes, but --context=", context,
                     " needs at least ", context + 1, "; give a longer text with --text"));
  }
  return TextData(std::move(text), context);
}

Batch TextData::Slice(const BatchPosition& position, int global_sequences, int rank,
                      int world_size) const {
  Batch batch{.sequences = 0, .context = context_, .inputs = {}, .targets = {}};
  const uint64_t starts = text_.size() - context_;
  const uint64_t stream = RandomBits(position.step, position.micro_step, 0);
  for (int sample = rank; sample < global_sequences; sample += world_size) {
    const auto* bytes = reinterpret_cast<const uint8_t*>(text_.data());
    const uint8_t* first = bytes + RandomBits(position.seed, stream, sample) % starts;
    batch.inputs.insert(batch.inputs.end(), first, first + context_);
    batch.targets.insert(batch.targets.end(), first + 1, first + 1 + context_);
    ++batch.sequences;
  }
  return batch;
}

}  // namespace ballast::worker
