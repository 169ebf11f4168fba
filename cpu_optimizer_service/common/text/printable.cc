#include "cpu_optimizer_service/common/text/printable.h"

#include "absl/strings/str_cat.h"

namespace ballast {
namespace {

// Bytes of the UTF-8 character at the begin of `text` that a terminal shows; 0: it is none.
size_t ShownBytes(absl::string_view text) {
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(text[i]); };
  const uint8_t first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  // The lead bytes of RFC 3629: 0xc0, 0xc1 and those from 0xf5 on begin no character.
  const size_t bytes = first >= 0xf5   ? 0
                       : first >= 0xf0 ? 4
                       : first >= 0xe0 ? 3
                       : first >= 0xc2 ? 2
                                       : 0;
  if (bytes == 0 || text.size() < bytes) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  // Longer forms of shorter characters, surrogates, and what is beyond Unicode.
  if ((first == 0xe0 && byte(1) < 0xa0) || (first == 0xed && byte(1) >= 0xa0) ||
      (first == 0xf0 && byte(1) < 0x90) || (first == 0xf4 && byte(1) >= 0x90)) {
    return 0;
  }
  // C1, and the marks that turn text around.
  if (first == 0xc2 && byte(1) < 0xa0) return 0;
  const bool turns = first == 0xe2 && ((byte(1) == 0x80 && byte(2) >= 0xaa && byte(2) <= 0xae) ||
                                       (byte(1) == 0x81 && byte(2) >= 0xa6 && byte(2) <= 0xa9));
  return turns ? 0 : bytes;
}

// Moves the first character of `text` to `printable`.
void TakeCharacter(absl::string_view& text, Newlines newlines, std::string& printable) {
  size_t bytes = ShownBytes(text);
  if (bytes == 0 && text[0] == '\n' && newlines == Newlines::kKeep) bytes = 1;
  // Only one byte is escaped at a time: the next one may begin a character that can be shown.
  if (bytes == 0) {
    absl::StrAppend(&printable, "\\x", absl::Hex(static_cast<uint8_t>(text[0]), absl::kZeroPad2));
    bytes = 1;
  } else {
    absl::StrAppend(&printable, text.substr(0, bytes));
  }
  text.remove_prefix(bytes);
}

}  // namespace

std::string Printable(absl::string_view text, Newlines newlines) {
  std::string printable;
  while (!text.empty()) TakeCharacter(text, newlines, printable);
  return printable;
}

std::string OneLine(absl::string_view text, size_t most_bytes) {
  std::string line;
  // Characters are not cut, so the line may be a few bytes longer than `most_bytes`.
  while (!text.empty() && line.size() < most_bytes) {
    TakeCharacter(text, Newlines::kEscape, line);
  }
  if (!text.empty()) line += "...";
  return line;
}

}  // namespace ballast
