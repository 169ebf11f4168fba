// The tokens that a model trains on, and the batches cut from them. A batch is a pure function of
// (seed, step, micro-step, global sample index), so a redone step is the same step, and any number
// of ranks work on the same global batch: rank r of W takes samples r, r + W, r + 2W, ...
//
// Tokens are the bytes of a text, or GPT-2's from files in the format of llm.c: files whose names
// end in .bin, of a header of 256 int32 (magic 20240520, version 1, number of tokens, zeros) and
// the tokens as uint16, all little-endian.
#ifndef BALLAST_GPU_WORKER_BASE_DATA_H_
#define BALLAST_GPU_WORKER_BASE_DATA_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace ballast::worker {

inline constexpr char kDefaultText[] = "/usr/share/common-licenses";

// The number of different tokens: bytes, and GPT-2's tokenizer's.
inline constexpr int kByteTokens = 256;
inline constexpr int kGpt2Tokens = 50257;

// The tokens are kept in memory, two bytes each, so their number is limited.
inline constexpr int64_t kMaxTokens = int64_t{1} << 31;

// `sequences` rows of `context` tokens, row after row; targets[i] is the token that follows
// inputs[i].
struct Batch {
  int sequences = 0;
  int context = 0;
  std::vector<int32_t> inputs;
  std::vector<int32_t> targets;
};

struct BatchPosition {
  uint64_t seed = 0;
  uint64_t step = 0;
  uint32_t micro_step = 0;
};

class TokenData {
 public:
  // Reads a file, or every plain file of a directory in order of name (links followed, each file
  // once), one after another: all of them token files, or none. NOT_FOUND or INVALID_ARGUMENT, with
  // what to do, if it cannot be read, is truncated, or has fewer than context + 1 tokens or more
  // than kMaxTokens.
  static absl::StatusOr<TokenData> Read(const std::string& path, int context);
  // The same for text in memory.
  static absl::StatusOr<TokenData> FromText(absl::string_view text, const std::string& name,
                                            int context);

  // Tokens are less than this: kByteTokens or kGpt2Tokens.
  int vocabulary() const { return vocabulary_; }
  // A hash of all tokens, to compare what two processes read. Reads them all.
  uint64_t Fingerprint() const;

  // This rank's slice of the global batch of `global_sequences` samples; may be empty.
  Batch Slice(const BatchPosition& position, int global_sequences, int rank, int world_size) const;

 private:
  TokenData(int vocabulary, std::vector<uint16_t> tokens, int context)
      : vocabulary_(vocabulary), tokens_(std::move(tokens)), context_(context) {}
  // Checks that the tokens are enough for sequences of the context.
  static absl::StatusOr<TokenData> Create(int vocabulary, std::vector<uint16_t> tokens,
                                          const std::string& name, int context);

  int vocabulary_;
  std::vector<uint16_t> tokens_;
  int context_;
};

}  // namespace ballast::worker

#endif  // BALLAST_GPU_WORKER_BASE_DATA_H_
