using System;
using System.IO;
using System.Text;

namespace SpecEdge
{
    /// <summary>A WAV file of 16-bit PCM with one channel at 16 kHz.</summary>
    internal static class WavFile
    {
        private const int Rate = 16000;

        /// <summary>Returns the samples, from -1 to 1; another format raises an InvalidDataException.</summary>
        internal static float[] Read(string path)
        {
            using (var reader = new BinaryReader(File.OpenRead(path)))
            {
                try
                {
                    if (Name(reader) != "RIFF" || reader.ReadUInt32() < 4 || Name(reader) != "WAVE")
                        throw Refused(path, "is not a WAV file");
                    for (bool isKnown = false; ;)
                    {
                        string name = Name(reader);
                        long size = reader.ReadUInt32(), end = reader.BaseStream.Position + size + (size & 1);
                        if (name == "fmt ")
                        {
                            int format = reader.ReadUInt16(), channels = reader.ReadUInt16(), rate = reader.ReadInt32();
                            reader.ReadBytes(6);
                            int bits = reader.ReadUInt16();
                            if (format != 1 || channels != 1 || rate != Rate || bits != 16)
                                throw Refused(path, $"has format {format} with {channels} channels of {bits} bits at {rate} Hz");
                            isKnown = true;
                        }
                        if (name == "data" && isKnown)
                        {
                            // Programs that write to pipes do not know the size.
                            size = Math.Min(size, reader.BaseStream.Length - reader.BaseStream.Position);
                            return Samples(reader.ReadBytes((int)Math.Min(size, int.MaxValue / 2)));
                        }
                        reader.BaseStream.Position = end;
                    }
                }
                catch (EndOfStreamException)
                {
                    throw Refused(path, "is damaged");
                }
            }
        }

        private static string Name(BinaryReader reader)
        {
            byte[] name = reader.ReadBytes(4);
            return name.Length == 4 ? Encoding.ASCII.GetString(name) : throw new EndOfStreamException();
        }

        private static float[] Samples(byte[] data)
        {
            var samples = new float[data.Length / 2];
            for (int i = 0; i < samples.Length; i++)
                samples[i] = (short)(data[2 * i] | data[2 * i + 1] << 8) / 32768f;
            return samples;
        }

        private static InvalidDataException Refused(string path, string problem) => new InvalidDataException(
            $"{path} {problem}; convert it: ffmpeg -i INPUT -ac 1 -ar {Rate} -c:a pcm_s16le OUTPUT.wav");
    }
}
