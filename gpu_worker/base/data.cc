#include "gpu_worker/base/data.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <ios>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "cpu_optimizer_service/common/status.h"
#include "gpu_worker/base/fnv1a.h"
#include "gpu_worker/base/random.h"

namespace ballast::worker {
namespace {

namespace fs = std::filesystem;

constexpr int32_t kMagic = 20240520;
constexpr int32_t kVersion = 1;
using Header = std::array<int32_t, 256>;

uint16_t AsToken(char byte) { return static_cast<uint8_t>(byte); }

bool IsTokenFile(absl::string_view path) { return absl::EndsWith(path, ".bin"); }

absl::Status Unreadable(const std::string& path) {
  return absl::NotFoundError(absl::StrCat("cannot read the text ", path,
                                          "; give a readable file or a directory of plain files "
                                          "with --text"));
}

absl::Status NotATokenFile(const std::string& path, absl::string_view why) {
  return absl::InvalidArgumentError(
      absl::StrCat("the token file ", path, " ", why,
                   "; give one that llm.c wrote for GPT-2 with --text, or rename it if it is text "
                   "(names of token files end in .bin)"));
}

// Makes place for `more` tokens and returns where they go.
absl::StatusOr<uint16_t*> Append(const std::string& path, uint64_t more,
                                 std::vector<uint16_t>& tokens) {
  // The difference is never negative: no earlier call has left more than kMaxTokens.
  if (more > static_cast<uint64_t>(kMaxTokens) - tokens.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "up to ", path, " the text has ", tokens.size() + more, " tokens, more than the ",
        kMaxTokens, " that one run takes; give a part of ", "it with --text"));
  }
  tokens.resize(tokens.size() + more);
  return tokens.data() + tokens.size() - more;
}

absl::Status AppendText(const std::string& path, std::vector<uint16_t>& tokens) {
  // The size is asked for once. If the file grows meanwhile, the rest is not read; if it shrinks,
  // that is an error below. Ranks that read different bytes notice it by Fingerprint.
  std::error_code error;
  const uint64_t size_bytes = fs::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) return Unreadable(path);
  BALLAST_ASSIGN_OR_RETURN(uint16_t * to, Append(path, size_bytes, tokens));
  // In pieces, so that a large text is not in memory twice.
  std::array<char, 1 << 16> bytes;
  for (uint64_t left = size_bytes; left > 0;) {
    const uint64_t now = std::min<uint64_t>(left, bytes.size());
    if (!file.read(bytes.data(), static_cast<std::streamsize>(now))) return Unreadable(path);
    to = std::transform(bytes.data(), bytes.data() + now, to, AsToken);
    left -= now;
  }
  return absl::OkStatus();
}

absl::Status AppendTokens(const std::string& path, std::vector<uint16_t>& tokens) {
  std::error_code error;
  const uint64_t size_bytes = fs::file_size(path, error);
  std::ifstream file(path, std::ios::binary);
  if (error || !file) return Unreadable(path);
  Header header;
  if (size_bytes < sizeof(header)) {
    return NotATokenFile(path, absl::StrCat("has ", size_bytes, " bytes, less than its header"));
  }
  if (!file.read(reinterpret_cast<char*>(header.data()), sizeof(header))) return Unreadable(path);
  // The header is read as it lies: its numbers are little-endian, as on x86-64.
  if (header[0] != kMagic) {
    return NotATokenFile(path, absl::StrCat("begins with ", header[0], ", not with ", kMagic));
  }
  if (header[1] != kVersion) {
    return NotATokenFile(path, absl::StrCat("has version ", header[1], ", not ", kVersion));
  }
  const uint64_t body_bytes = size_bytes - sizeof(header);
  // This check is before memory is taken: a wrong count, which the file's size contradicts, cannot
  // ask for gigabytes. It also notices a copy that was cut off.
  if (header[2] < 0 || body_bytes != uint64_t{static_cast<uint32_t>(header[2])} * 2) {
    return NotATokenFile(path, absl::StrCat("has ", body_bytes, " bytes of tokens where ",
                                            header[2], " tokens of 2 bytes should be"));
  }
  BALLAST_ASSIGN_OR_RETURN(uint16_t* const to, Append(path, header[2], tokens));
  if (!file.read(reinterpret_cast<char*>(to), static_cast<std::streamsize>(body_bytes))) {
    return Unreadable(path);
  }
  // The CPU's passes look a token's row up without a check of their own. This one, and RunWorker's
  // comparison of the vocabularies, keep them inside the embedding.
  const uint16_t* const end = to + header[2];
  const uint16_t* const unknown = std::find_if(static_cast<const uint16_t*>(to), end,
                                               [](uint16_t token) { return token >= kGpt2Tokens; });
  if (unknown == end) return absl::OkStatus();
  return NotATokenFile(path, absl::StrCat("has token ", *unknown, " at place ", unknown - to,
                                          ", but GPT-2's are less than ", kGpt2Tokens));
}

// The plain files of a directory, links resolved, so that GPL -> GPL-3 does not count twice.
absl::StatusOr<std::set<std::string>> FilesOf(const std::string& directory) {
  std::error_code error;
  // Sorted, so that all ranks read them in one order.
  std::set<std::string> files;
  fs::directory_iterator entry(directory, error);
  // Not a for over the range, which throws where the directory cannot be read to its end.
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    // Folders and links to nothing are left out without an error.
    std::error_code no_file;
    if (!entry->is_regular_file(no_file)) continue;
    const fs::path file = fs::canonical(entry->path(), no_file);
    if (!no_file) files.insert(file.string());
  }
  if (error) return Unreadable(directory);
  return files;
}

}  // namespace

absl::StatusOr<TokenData> TokenData::Read(const std::string& path, int context) {
  std::error_code error;
  std::set<std::string> files;
  if (fs::is_directory(path, error)) {
    BALLAST_ASSIGN_OR_RETURN(files, FilesOf(path));
  } else {
    if (!fs::is_regular_file(path, error)) return Unreadable(path);  // A device may never end.
    files.insert(path);
  }
  // Both kinds in one directory would be two vocabularies in one text.
  const auto token_files =
      std::count_if(files.begin(), files.end(), [](const auto& file) { return IsTokenFile(file); });
  if (token_files != 0 && token_files != static_cast<int64_t>(files.size())) {
    return absl::InvalidArgumentError(
        absl::StrCat("the directory ", path, " has ", token_files,
                     " token files (.bin) and other files too; give a directory of one kind, or "
                     "one file, with --text"));
  }
  std::vector<uint16_t> tokens;
  for (const std::string& file : files) {
    BALLAST_RETURN_IF_ERROR(token_files == 0 ? AppendText(file, tokens)
                                             : AppendTokens(file, tokens));
  }
  return Create(token_files == 0 ? kByteTokens : kGpt2Tokens, std::move(tokens), path, context);
}

absl::StatusOr<TokenData> TokenData::FromText(absl::string_view text, const std::string& name,
                                              int context) {
  std::vector<uint16_t> tokens;
  BALLAST_ASSIGN_OR_RETURN(uint16_t* const to, Append(name, text.size(), tokens));
  std::transform(text.begin(), text.end(), to, AsToken);
  return Create(kByteTokens, std::move(tokens), name, context);
}

absl::StatusOr<TokenData> TokenData::Create(int vocabulary, std::vector<uint16_t> tokens,
                                            const std::string& name, int context) {
  if (static_cast<int64_t>(tokens.size()) <= context) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text ", name, " has ", tokens.size(),
                     vocabulary == kByteTokens ? " bytes" : " tokens", ", but --context=", context,
                     " needs at least ", context + 1, "; give a longer text with --text"));
  }
  return TokenData(vocabulary, std::move(tokens), context);
}

uint64_t TokenData::Fingerprint() const {
  Fnv1a hash;
  hash.Add(static_cast<uint64_t>(vocabulary_));
  // A round takes a whole token and not its two bytes: that halves the multiplications.
  for (const uint16_t token : tokens_) hash.Add(token);
  return hash.hash();
}

Batch TokenData::Slice(const BatchPosition& position, int global_sequences, int rank,
                       int world_size) const {
  Batch batch{.sequences = 0, .context = context_, .inputs = {}, .targets = {}};
  // A sample has one token more than the context, because targets are shifted by one.
  const uint64_t starts = tokens_.size() - context_;
  // Step and micro-step become one number, because RandomBits has three arguments and the seed and
  // the sample take the other two.
  const uint64_t stream = RandomBits(position.step, position.micro_step, 0);
  // A sample is a function of its index in the global batch, so the batch does not depend on the
  // world size.
  for (int sample = rank; sample < global_sequences; sample += world_size) {
    // Starts are drawn with replacement: a sample may come again, and there are no epochs. The
    // remainder favours some starts by less than one part in 2^32, since there are at most 2^31 of
    // them.
    const uint16_t* first = tokens_.data() + RandomBits(position.seed, stream, sample) % starts;
    batch.inputs.insert(batch.inputs.end(), first, first + context_);
    batch.targets.insert(batch.targets.end(), first + 1, first + 1 + context_);
    ++batch.sequences;
  }
  return batch;
}

}  // namespace ballast::worker
