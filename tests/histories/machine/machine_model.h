// What a step's machine should say, in as few words as possible: counts, no messages, no reasons.
#ifndef BALLAST_TESTS_HISTORIES_MACHINE_MACHINE_MODEL_H_
#define BALLAST_TESTS_HISTORIES_MACHINE_MACHINE_MODEL_H_

#include <cstdint>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace ballast::histories {

// What became of what a rank said.
enum class Said : uint8_t { kTaken, kRepeat, kDropped, kRefused, kError };

class MachineModel {
 public:
  enum class Stage : uint8_t { kNone, kOpen, kSealed, kVoting, kDecided };
  struct Rank {
    uint32_t attempt = 0;
    bool begun = false;
    uint32_t ended = 0;
    std::optional<uint32_t> sealed;
    std::optional<int> vote;
    bool operator==(const Rank&) const = default;
  };
  struct Chunk {
    int rank = 0;
    uint32_t next = 0;
    bool closed = false;
    std::set<uint32_t> empty;  // Micro-steps.
  };

  MachineModel(int ranks, const std::vector<int>& rank_of_chunk) : ranks(ranks) {
    for (const int rank : rank_of_chunk) chunks.push_back({.rank = rank});
  }

  Said Begin(int r, uint64_t step, uint32_t attempt, int settings);
  Said Contribute(int chunk, uint64_t step, uint32_t attempt, uint32_t begin, uint32_t end,
                  bool final, bool empty);
  Said EndMicroStep(int r, uint64_t step, uint32_t attempt, uint32_t micro_step, bool uses);
  Said Seal(int r, uint64_t step, uint32_t attempt, uint32_t n, std::optional<int> vote);
  Said Vote(int r, uint64_t step, uint32_t attempt, int vote);
  Said Discard(int r, uint64_t step, uint32_t attempt);
  // True: it is to be decided.
  bool SumsAreKnown();
  void Commit();
  void Drop();
  // Another process has what was kept: all but seals and votes.
  void Die();

  Stage stage = Stage::kNone;
  std::vector<Rank> ranks;
  std::vector<Chunk> chunks;
  uint64_t committed = 0;

 private:
  uint32_t live() const;
  bool IsOpen(uint64_t step) const { return stage == Stage::kOpen && step == committed + 1; }
  bool VotesAgree();
  Said TakeVote(int r, int vote);

  std::optional<int> settings_;    // Of the live attempt.
  std::set<uint32_t> used_in_;     // Micro-steps of it in which a gradient was used.
  uint32_t last_micro_steps_ = 0;  // Of the committed step.
  std::optional<int> last_vote_;
  bool has_sums_ = false;
  bool taken_over_ = false;
};

}  // namespace ballast::histories

#endif  // BALLAST_TESTS_HISTORIES_MACHINE_MACHINE_MODEL_H_
